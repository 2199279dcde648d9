"""Prices op calls: family models where there are any, warm and cold cache mixed by reuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import pandas as pd

from itercast.compose.graph.attention_kernels import SIXTEEN_BIT, kernel_ratio
from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.pricing.assumed_time import AssumedShares
from itercast.compose.pricing.fallbacks import fallback_parts, has_model
from itercast.compose.pricing.power_limit import sustained_flops_per_s
from itercast.learners.family_model import FamilyModel
from itercast.learners.features.host_calls import HostCall
from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.host import REFERENCE, USUAL, HostMachine, call_launches
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.hardware.stack import USUAL as USUAL_STACK
from itercast.microbench.hardware.stack import stack_of_row
from itercast.microbench.opcall import OpCall
from itercast.microbench.ops import find_family
from itercast.microbench.ops.family import Family, Part
from itercast.microbench.ops.memory.elementwise import memory_copy

UNMODELLED = "unmodelled"
ATTENTION = "attention"  # the family whose kernels stacks choose
ROOFLINE_OVERHEAD_US: float = assumed(__file__, "roofline_overhead_us")
# no assumption: standard deviations between the 10 and 90 % quantiles of a normal distribution
DECILES_APART = 2.563


class Pricer(Protocol):
    """Anything that prices rows of a family, as ``itercast.learners.bundle.Bundle`` does."""

    @property
    def models(self) -> Mapping[str, Any]:
        """Families that have a model."""

    def price(
        self, family: str, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None
    ) -> pd.DataFrame:
        """Forecasts rows: columns predicted_us, predicted_us_p10, predicted_us_p90 and in_envelope.

        ``in_envelope``: every feature is within the range of the training rows.
        """

    def inside(
        self, family: str, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None
    ) -> Sequence[bool]:
        """Returns the column in_envelope of ``price`` alone, which is cheap to compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOp:
    """One call with its duration; ``family`` is "unmodelled" where no learned model priced it.

    ``latency_us``: the part of a message on a CPU during which ranks sleep. ``launch_us``: host
    time of the call on a GPU, None where it was not measured; it launches ``kernels`` kernels of
    equal length. ``call_launches``: host time of its call over that of a pointwise op.
    ``assumed``: shares of ``duration_us`` that rest on assumptions, by their names. ``leads``: the
    share of the step's host time that comes before it, where a CUDA graph launches all ops.
    """

    op: str
    family: str
    phase: str
    duration_us: float
    flops: float
    latency_us: float = 0.0
    launch_us: float | None = None
    kernels: int = 1
    call_launches: float = 1.0
    assumed: AssumedShares = ()
    leads: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Priceable:
    """An op to price: its parameters in the family that answers for it, and its tensors' bytes.

    ``cold``: the share of its bytes that no cache holds. ``kernel``: the attention kernel, where
    the step states one; ``channels_last``: images are NHWC in memory.
    """

    op: str
    phase: str
    family: Family | None
    params: Any
    bytes_moved: float
    cold: float
    kernel: str = ""
    channels_last: bool = False


Prices = dict[str, dict[Any, tuple[dict[str, float], dict[str, float]]]]


class PriceBook:
    """Caches prices of ops on one device: each is computed once, as plans share most of their ops.

    Ranks on a CPU share its cores, so that a plan decides the threads of a rank: ops are priced for
    all those numbers of threads in one call, and ``by_threads`` holds a book for each. ``stack`` is
    the software that is forecast; where models know several it decides whose rows count. ``host``
    is the machine that runs Python.
    """

    def __init__(
        self,
        pricer: Pricer,
        gpu: Gpu,
        threads: int,
        by_threads: dict[int, Prices] | None = None,
        stack: str = USUAL_STACK,
        host: HostMachine = REFERENCE,
    ) -> None:
        self.pricer, self.gpu, self.threads, self.stack = pricer, gpu, threads, stack
        self.host = host
        self.models = {n: m for n, m in pricer.models.items() if answers(m, gpu)}
        self.by_threads: dict[int, Prices] = {} if by_threads is None else by_threads
        self.by_threads.setdefault(threads, {})
        self.flops: dict[Any, float] = {}  # by parameters
        self.parts: dict[Any, list[Part]] = {}  # by parameters and memory format
        self.ops: dict[Any, PricedOp] = {}  # by all that an op to price states
        self.kernel_ratios: dict[Any, float] = {}  # by stated attention kernel and parameters
        self.sent: dict[Any, PricedOp] = {}  # collectives by message, group and node
        self.python: dict[Any, PricedOp] = {}  # parallel wrappers by event, count and share
        self.calls: dict[tuple[str, str], HostCall | None] = {}  # host time by family and op

    @property
    def host_is_named(self) -> bool:
        """Whether the host was asked for by its name, so that its numbers are not assumed."""
        return self.host.name not in (USUAL, REFERENCE.name)

    @property
    def prices(self) -> Prices:
        """Price rows, warm and cold cache, by family and parameters, for these threads."""
        return self.by_threads[self.threads]

    def points(self, family: str, points: Iterable[Any]) -> Mapping[Any, Any]:
        """Returns a family's price rows, warm and cold; prices those still missing."""
        prices = self.prices.setdefault(family, {})
        fresh = list(dict.fromkeys(p for p in points if p not in prices))
        if fresh:
            blocks = [(n, cache) for n in self.by_threads for cache in ("warm", "cold")]
            names = [f.name for f in fields(fresh[0])]
            columns = {name: [getattr(p, name) for p in fresh] * len(blocks) for name in names}
            columns["threads"] = [n for n, _ in blocks for _ in fresh]
            columns["cache"] = [cache for _, cache in blocks for _ in fresh]
            rows = pd.DataFrame({**columns, "gpu": self.gpu.name, "stack_wanted": self.stack})
            priced: list[Any] = self.expected(family, rows).to_dict("records")
            for at, n in enumerate(self.by_threads):
                start = 2 * at * len(fresh)
                warm, cold = (priced[start + k * len(fresh) :][: len(fresh)] for k in (0, 1))
                pairs = zip(warm, cold, strict=True)
                self.by_threads[n].setdefault(family, {}).update(zip(fresh, pairs, strict=True))
        return prices

    def expected(self, family: str, rows: pd.DataFrame) -> pd.DataFrame:
        """Returns price rows with means in place of medians: only means add up to a sum's mean.

        Of a log-normal time: mean = median * exp(s**2 / 2), s the standard deviation of its log
        (Duan's smearing, doi:10.2307/2288126). Outside the training range, as on an unseen GPU, all
        ops err in the same direction rather than independently, and medians stay.
        """
        table = self.pricer.price(family, rows, {self.gpu.name: self.gpu})
        low, high = (np.log(table[f"predicted_us_{q}"].clip(lower=1e-9)) for q in ("p10", "p90"))
        s = (high - low) / DECILES_APART * table["in_envelope"]
        return table.assign(predicted_us=table["predicted_us"] * np.exp(s**2 / 2))

    def price(self, wanted: Sequence[Priceable]) -> list[PricedOp]:
        """Every op with its price; one pricer call per family."""
        all_parts = self.prefetch(wanted)
        return [self._known(w, parts) for w, parts in zip(wanted, all_parts, strict=True)]

    def _known(self, w: Priceable, parts: Sequence[Part]) -> PricedOp:
        """The op's price, computed once for ops that are equal."""
        key = (w.op, w.phase, w.params, w.bytes_moved, w.cold, w.kernel, w.channels_last)
        if key not in self.ops:
            self.ops[key] = self._one(w, parts)
        return self.ops[key]

    def prefetch(self, wanted: Sequence[Priceable]) -> list[list[Part]]:
        """Price in one call per family all that these ops need; returns each op's parts."""
        parts = [self._parts(w) for w in wanted]
        by_family: dict[str, list[Any]] = {}
        for part in (part for parts_of_op in parts for part in parts_of_op):
            by_family.setdefault(part.family, []).append(part.params)
        for name, points in by_family.items():
            self.points(name, points)
        return parts

    def _parts(self, w: Priceable) -> list[Part]:
        """The ops that an op is priced as: itself, its family's fallback, a copy, or none."""
        key = (w.params, w.channels_last, w.params is None and w.bytes_moved)
        if key not in self.parts:
            self.parts[key] = self._found_parts(w)
        return self.parts[key]

    def _found_parts(self, w: Priceable) -> list[Part]:
        models, on_gpu = self.models, self.gpu.kind != "cpu"
        if found := fallback_parts(w.params, models, w.channels_last, self.gpu, self.stack):
            return found
        if w.family is not None and w.family.name in models:
            return [Part(family=w.family.name, params=w.params)]
        if on_gpu and has_model(models, "elementwise"):
            return [memory_copy(_moved(w, self.gpu))]
        return []

    def _flops(self, family: Family, params: Any) -> float:
        if params not in self.flops:
            self.flops[params] = float(family.flops(params))
        return self.flops[params]

    def _call(self, w: Priceable) -> HostCall | None:
        """Measured host time of a call on a GPU; on a CPU it is part of the op."""
        if w.family is None or self.gpu.kind == "cpu" or self.host_is_named:
            return None
        key = (w.family.name, getattr(w.params, "op", ""))
        if key not in self.calls:
            model = self.models.get(key[0])
            measured = isinstance(model, FamilyModel)
            self.calls[key] = model.host_call(self.gpu.name, key[1]) if model and measured else None
        return self.calls[key]

    def _kernel_ratio(self, w: Priceable) -> float:
        """Time of the attention kernel that runs over that of the kernels its rows measured."""
        p, model = w.params, self.models.get(ATTENTION)
        if w.family is None or w.family.name != ATTENTION or self.gpu.kind == "cpu":
            return 1.0
        if p.dtype not in SIXTEEN_BIT:
            return 1.0
        key = (w.kernel, p)
        if key not in self.kernel_ratios:
            kernel = w.kernel or stack_of_row(self.stack).attention_on(self.gpu)
            rows: dict[tuple[str, str], float] = {}
            gpus = {self.gpu.name: self.gpu}
            if isinstance(model, FamilyModel):
                op = p.op if model.covers(self.gpu, p.op, p.dtype) else "forward"
                rows = model.row_sources(self.gpu, op, p.dtype, self.stack, w.family)
                gpus = {**model.source_gpus.gpus, **gpus}
            self.kernel_ratios[key] = kernel_ratio(kernel, w.family, p, self.gpu, rows, gpus)
        return self.kernel_ratios[key]

    def _throttled(self, w: Priceable, us: float, flops: float) -> float:
        """Returns the factor by which a busy GPU's power limit lengthens an op."""
        if w.family is None or not w.family.matmul or self.gpu.kind == "cpu" or not us:
            return 1.0
        return max(1.0, 1e6 * flops / sustained_flops_per_s(self.gpu, w.params.dtype) / us)

    def _one(self, w: Priceable, parts: Sequence[Part]) -> PricedOp:
        name = w.family.name if w.family is not None else UNMODELLED
        flops = self._flops(w.family, w.params) if w.family else 0.0
        us = other_us = 0.0
        ratio = self._kernel_ratio(w)
        for part in parts:
            warm, cool = self.prices[part.family][part.params]
            one_us = (1 - w.cold) * warm["predicted_us"] + w.cold * cool["predicted_us"]
            one_us *= ratio * part.times
            us += one_us
            other_us += 0.0 if _same_op(part, w) else abs(one_us)
        if name not in self.models:
            name = UNMODELLED
            dtype = getattr(w.params, "dtype", "fp32")
            if not parts:
                us = _moved(w, self.gpu) / self.gpu.hbm_bytes_per_s * 1e6 + ROOFLINE_OVERHEAD_US
            us = max(us, flops / self.gpu.peak(dtype) * 1e6)
            other_us = us
        us *= self._throttled(w, us, flops)
        call = self._call(w)
        shares = _assumed_shares(w, parts, min(1.0, other_us / us) if us > 0 else 0.0)
        if ratio != 1.0:
            shares = (("attention_kernels.over_flash_2", 1.0),)
        return PricedOp(
            op=w.op,
            family=name,
            phase=w.phase,
            duration_us=us,
            flops=flops,
            launch_us=call.us(getattr(w.params, "tensors", 1)) if call else None,
            kernels=max(1, round(call.kernels)) if call else 1,
            call_launches=_call_launches(w),
            assumed=shares,
        )


def _same_op(part: Part, w: Priceable) -> bool:
    """Whether a part is priced by the op's own family as the same op."""
    same_family = w.family is not None and part.family == w.family.name
    return same_family and getattr(part.params, "op", "") == getattr(w.params, "op", "")


def _assumed_shares(w: Priceable, parts: Sequence[Part], other_frac: float) -> AssumedShares:
    """Assumption of the ``other_frac`` of an op's time that its own model does not price."""
    if not parts:
        return (("price_book.roofline_overhead_us", other_frac),)
    family = w.family.name if w.family is not None else UNMODELLED
    return ((f"fallbacks.{family}", other_frac),) if other_frac else ()


def _call_launches(w: Priceable) -> float:
    """Host time of the call over that of a pointwise op."""
    if w.family is None:
        return 1.0
    return call_launches(w.family.name, getattr(w.params, "op", ""))


def answers(model: Any, gpu: Gpu) -> bool:
    """Whether a family's model was learned from devices of this kind."""
    return not isinstance(model, FamilyModel) or model.covers_kind(gpu)


def _moved(w: Priceable, gpu: Gpu) -> float:
    """Bytes read and written: by the family's formula, else every tensor once."""
    if w.family is None:
        return w.bytes_moved
    if w.family.cached_bytes is not None:
        return float(w.family.cached_bytes(w.params, gpu))
    return float(w.family.bytes_moved(w.params))


@cached_by_identity
def _books(pricer: Pricer, gpu: Gpu, stack: str, host: HostMachine) -> dict[int, PriceBook]:
    by_threads: dict[int, Prices] = {}
    cores = gpu.sm_count if gpu.kind == "cpu" else 0
    numbers = {max(1, cores >> halvings) for halvings in range(cores.bit_length())} or {0}
    return {n: PriceBook(pricer, gpu, n, by_threads, stack, host) for n in sorted(numbers)}


def price_book(
    pricer: Pricer, gpu: Gpu, threads: int, stack: str = USUAL_STACK, host: HostMachine = REFERENCE
) -> PriceBook:
    """Return the cache of op prices for this pricer, device and number of threads.

    Calls with equal arguments get the same book, so that plans share its prices.
    """
    books = _books(pricer, gpu, stack, host)
    if threads not in books:
        books[threads] = PriceBook(pricer, gpu, threads, stack=stack, host=host)
    return books[threads]


def priceable(call: OpCall, cold: float = 1.0) -> Priceable:
    """Finds an op call's family and parameters, so that it can be priced.

    ``cold``: the share of its bytes that are read from memory, not from a cache.
    """
    family, params = find_family(call)
    return Priceable(
        op=call.op,
        phase=call.phase,
        family=family,
        params=params,
        bytes_moved=touched_bytes(call),
        cold=cold,
        kernel=str(call.kwargs.get("kernel", "")),
        channels_last=_channels_last(call),
    )


def touched_bytes(call: OpCall) -> int:
    """Bytes of all tensors that a call reads and writes."""
    return sum(t.nbytes for t in (*call.tensors(), *call.outputs))


def _channels_last(call: OpCall) -> bool:
    """Whether the images that an op reads are NHWC; one channel is both, and counts as NCHW."""
    images = [t for t in call.tensors() if len(t.shape) == 4 and t.shape[1] > 1 and t.stride]
    return bool(images) and images[0].stride[1] == 1 and not images[0].contiguous
