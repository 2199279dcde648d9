"""Op calls to durations: family models where there are any, warm and cold mixed by reuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import pandas as pd

from compose.graph.attention_kernels import SLOWDOWN
from compose.graph.identity_cache import remembered
from compose.pricing.fallbacks import TORCH, Part, copy, learned, stand_ins
from learners.family_model import FamilyModel
from learners.features.host_calls import HostCall
from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall
from microbench.ops import find_family
from microbench.ops.family import Family

UNMODELLED = "unmodelled"
TENTHS = 2.563  # standard deviations between the 10 and 90 % quantiles of a normal distribution


class Pricer(Protocol):
    """What prices rows of a family; ``learners.bundle.Bundle`` does."""

    @property
    def models(self) -> Mapping[str, Any]:
        """Families that have a model."""

    def price(
        self, family: str, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None
    ) -> pd.DataFrame:
        """predicted_us, predicted_us_p10, predicted_us_p90, in_envelope."""

    def inside(
        self, family: str, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None
    ) -> Sequence[bool]:
        """in_envelope alone, which costs next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOp:
    """One call with its duration; ``family`` is unmodelled where a roofline stood in.

    ``latency_us``: the part of a message on a CPU that ranks sleep, not copy. ``launch_us`` is what
    calling it costs the host of a GPU, None where no row tells, and ``kernels`` how many kernels
    that launches, each as long as the others.
    """

    op: str
    family: str
    phase: str
    duration_us: float
    low_us: float
    high_us: float
    flops: float
    in_envelope: bool
    latency_us: float = 0.0
    launch_us: float | None = None
    kernels: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Priceable:
    """An op to price: a family's parameters where one answers, and its tensors' bytes.

    ``slowdown``: how much slower its kernel is than those the family was measured with;
    ``channels_last``: its images lie in memory as NHWC.
    """

    op: str
    phase: str
    family: Family | None
    params: Any
    bytes_moved: float
    cold: float
    slowdown: float = 1.0
    channels_last: bool = False


Prices = dict[str, dict[Any, tuple[dict[str, float], dict[str, float]]]]


class PriceBook:
    """Prices of one pricer on one device, each asked for once: plans share most of their ops.

    On a CPU plans share its cores, so ops are priced for all numbers of threads that plans leave a
    rank, in one question: ``shared`` are the prices of all these books. ``stack`` is the software
    that is forecast: where rows of several were learned, those of it answer.
    """

    def __init__(
        self,
        pricer: Pricer,
        gpu: Gpu,
        threads: int,
        shared: dict[int, Prices] | None = None,
        stack: str = TORCH,
    ) -> None:
        self.pricer, self.gpu, self.threads, self.stack = pricer, gpu, threads, stack
        self.models = {n: m for n, m in pricer.models.items() if answers(m, gpu)}
        self.by_threads: dict[int, Prices] = {} if shared is None else shared
        self.by_threads.setdefault(threads, {})
        self.flops: dict[Any, float] = {}  # by parameters
        self.sent: dict[Any, PricedOp] = {}  # collectives, by message and group
        self.python: dict[Any, PricedOp] = {}  # the host's, by event, count and share
        self.calls: dict[tuple[str, str], HostCall | None] = {}  # by family and op

    @property
    def known(self) -> Prices:
        """Warm and cold price rows by family and parameters."""
        return self.by_threads[self.threads]

    def points(self, family: str, points: Iterable[Any]) -> Mapping[Any, Any]:
        """Warm and cold price rows of a family's parameters."""
        known = self.known.setdefault(family, {})
        fresh = list(dict.fromkeys(p for p in points if p not in known))
        if fresh:
            asked = [(n, cache) for n in self.by_threads for cache in ("warm", "cold")]
            names = [f.name for f in fields(fresh[0])]
            columns = {name: [getattr(p, name) for p in fresh] * len(asked) for name in names}
            columns["threads"] = [n for n, _ in asked for _ in fresh]
            columns["cache"] = [cache for _, cache in asked for _ in fresh]
            rows = pd.DataFrame({**columns, "gpu": self.gpu.name, "stack_wanted": self.stack})
            priced: list[Any] = self.expected(family, rows).to_dict("records")
            for at, n in enumerate(self.by_threads):
                own = priced[2 * at * len(fresh) :]
                pairs = zip(own[: len(fresh)], own[len(fresh) : 2 * len(fresh)], strict=True)
                self.by_threads[n].setdefault(family, {}).update(zip(fresh, pairs, strict=True))
        return known

    def expected(self, family: str, rows: pd.DataFrame) -> pd.DataFrame:
        """Price rows with means instead of medians: of these alone do sums make sense.

        Log-normal: exp(s**2 / 2) above the median (Duan's smearing, doi:10.2307/2288126). Outside
        the envelope, say on a GPU never seen, ops err alike: there medians add up.
        """
        table = self.pricer.price(family, rows, {self.gpu.name: self.gpu})
        low, high = (np.log(table[f"predicted_us_{q}"].clip(lower=1e-9)) for q in ("p10", "p90"))
        s = (high - low) / TENTHS * table["in_envelope"]
        return table.assign(predicted_us=table["predicted_us"] * np.exp(s**2 / 2))

    def price(self, wanted: Sequence[Priceable]) -> list[PricedOp]:
        """Every op priced; one pricer call per family."""
        return [self._one(w, parts) for w, parts in zip(wanted, self.ask(wanted), strict=True)]

    def ask(self, wanted: Sequence[Priceable]) -> list[list[Part]]:
        """The pricer asked for what the book does not know of these; what each op is priced as."""
        parts = [self._parts(w) for w in wanted]
        by_family: dict[str, list[Any]] = {}
        for part in (part for found in parts for part in found):
            by_family.setdefault(part.family, []).append(part.params)
        for name, points in by_family.items():
            self.points(name, points)
        return parts

    def _parts(self, w: Priceable) -> list[Part]:
        """What is priced for an op: itself, what stands in for it, or nothing."""
        models, on_gpu = self.models, self.gpu.kind != "cpu"
        if found := stand_ins(w.params, models, w.channels_last, self.gpu, self.stack):
            return found
        if w.family is not None and w.family.name in models:
            return [Part(family=w.family.name, params=w.params)]
        return [copy(_moved(w))] if on_gpu and learned(models, "elementwise") else []

    def _flops(self, family: Family, params: Any) -> float:
        if params not in self.flops:
            self.flops[params] = float(family.flops(params))
        return self.flops[params]

    def _call(self, w: Priceable) -> HostCall | None:
        """What a call costs the host of a GPU; on a CPU that is part of the op."""
        if w.family is None or self.gpu.kind == "cpu":
            return None
        key = (w.family.name, getattr(w.params, "op", ""))
        if key not in self.calls:
            model = self.models.get(key[0])
            told = isinstance(model, FamilyModel)
            self.calls[key] = model.host_call(self.gpu.name, key[1]) if model and told else None
        return self.calls[key]

    def _one(self, w: Priceable, parts: Sequence[Part]) -> PricedOp:
        name = w.family.name if w.family is not None else UNMODELLED
        flops = self._flops(w.family, w.params) if w.family else 0.0
        us = low_us = high_us = 0.0
        inside = True
        for part in parts:
            warm, cool = self.known[part.family][part.params]
            one_us, one_low_us, one_high_us = (
                w.slowdown * part.times * ((1 - w.cold) * warm[k] + w.cold * cool[k])
                for k in ("predicted_us", "predicted_us_p10", "predicted_us_p90")
            )
            us, low_us, high_us = us + one_us, low_us + one_low_us, high_us + one_high_us
            inside = inside and bool(warm["in_envelope"]) and part.params is w.params
        if name not in self.models:
            name, inside = UNMODELLED, False
            dtype = getattr(w.params, "dtype", "fp32")
            if not parts:
                us = _moved(w) / self.gpu.hbm_bytes_per_s * 1e6 + 2.0
            us = max(us, flops / self.gpu.peak(dtype) * 1e6)
            low_us, high_us = us / 2, us * 2
        call = self._call(w)
        return PricedOp(
            op=w.op,
            family=name,
            phase=w.phase,
            duration_us=us,
            low_us=low_us,
            high_us=high_us,
            flops=flops,
            in_envelope=inside,
            launch_us=call.us(getattr(w.params, "tensors", 1)) if call else None,
            kernels=max(1, round(call.kernels)) if call else 1,
        )


def answers(model: Any, gpu: Gpu) -> bool:
    """Whether a family's model was learned from devices of this kind."""
    return not isinstance(model, FamilyModel) or model.answers(gpu)


def _moved(w: Priceable) -> float:
    """Bytes read and written: what the family says, else every tensor once."""
    return float(w.family.bytes_moved(w.params)) if w.family is not None else w.bytes_moved


@remembered
def _books(pricer: Pricer, gpu: Gpu, stack: str) -> dict[int, PriceBook]:
    shared: dict[int, Prices] = {}
    cores = gpu.sm_count if gpu.kind == "cpu" else 0
    numbers = {max(1, cores >> halvings) for halvings in range(cores.bit_length())} or {0}
    return {n: PriceBook(pricer, gpu, n, shared, stack) for n in sorted(numbers)}


def price_book(pricer: Pricer, gpu: Gpu, threads: int, stack: str = TORCH) -> PriceBook:
    """The book of this pricer, device and number of threads, with all it knows from other plans."""
    books = _books(pricer, gpu, stack)
    if threads not in books:
        books[threads] = PriceBook(pricer, gpu, threads, stack=stack)
    return books[threads]


def priceable(call: OpCall, cold: float = 1.0) -> Priceable:
    """What a call needs to be priced."""
    family, params = find_family(call)
    moved = sum(t.nbytes for t in (*call.tensors(), *call.outputs))
    return Priceable(
        op=call.op,
        phase=call.phase,
        family=family,
        params=params,
        bytes_moved=moved,
        cold=cold,
        slowdown=SLOWDOWN.get(str(call.kwargs.get("kernel", "")), 1.0),
        channels_last=_channels_last(call),
    )


def _channels_last(call: OpCall) -> bool:
    """Whether the images an op reads lie as NHWC; a single channel lies as both."""
    images = [t for t in call.tensors() if len(t.shape) == 4 and t.shape[1] > 1 and t.stride]
    return bool(images) and images[0].stride[1] == 1 and not images[0].contiguous
