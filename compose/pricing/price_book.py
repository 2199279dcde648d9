"""Prices op calls: family models where there are any, warm and cold cache mixed by reuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import pd
from itercast.capture.opcall import CELLS
from itercast.compose.graph.attention_kernels import SIXTEEN_BIT, kernel_ratio
from itercast.compose.graph.compiled.padded_products import LEAST_GAIN, padded_parts
from itercast.compose.graph.identity_cache import Once, cached_by_identity
from itercast.compose.machines.contention import TAKING_TURNS, Slowdowns, mixed, slowdowns
from itercast.compose.machines.factors import NONE, Factors
from itercast.compose.machines.state import Machine
from itercast.compose.pricing.fallbacks import fallback_parts
from itercast.compose.pricing.power_limit import throttled_us
from itercast.compose.pricing.priced_op import UNMODELLED, Priceable, PricedOp
from itercast.learners.bundle import Bundle
from itercast.learners.family_model import FamilyModel
from itercast.learners.features.host_calls import HostCall
from itercast.learners.kept_answers import kept_answer
from itercast.microbench.hardware.host import REFERENCE, USUAL, HostMachine
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.hardware.stack import USUAL as USUAL_STACK
from itercast.microbench.hardware.stack import stack_of_row
from itercast.microbench.ops.family import Part
from itercast.microbench.ops.matrix.recurrent import ONE_DNN
from itercast.microbench.ops.memory.elementwise import memory_copy

ATTENTION = "attention"  # the family whose kernels stacks choose
ROOFLINE_OVERHEAD_US: float = assumed(__file__, "roofline_overhead_us")
# no assumption: standard deviations between the 10 and 90 % quantiles of a normal distribution
DECILES_APART = 2.563
Prices = dict[str, dict[Any, tuple[dict[str, float], dict[str, float]]]]


class PriceBook:
    """Caches prices of ops on one device: each is computed once, as plans share most of their ops.

    Ranks on a CPU share its cores, so that a plan decides the threads of a rank: ops are priced for
    all those numbers of threads in one call, and ``by_threads`` holds a book for each. ``stack`` is
    the software that is forecast; where models know several it decides whose rows count. ``host``
    is the machine that runs Python; ``machine`` has the factors of ops, messages and host (``on``).
    """

    def __init__(
        self,
        pricer: Bundle,
        gpu: Gpu,
        threads: int,
        by_threads: dict[int, Prices] | None = None,
        stack: str = USUAL_STACK,
        host: HostMachine = REFERENCE,
    ) -> None:
        self.pricer, self.gpu, self.threads, self.stack = pricer, gpu, threads, stack
        self.host, self.machine = host, NONE
        self.known: Machine | None = None  # what measured steps say of the machine, of this model
        self.model = ""
        self.models: Mapping[str, FamilyModel | None] = {
            name: model
            for name, model in pricer.models.items()
            if model is None or model.covers_kind(gpu)
        }
        self.by_threads: dict[int, Prices] = {} if by_threads is None else by_threads
        self.by_threads.setdefault(threads, {})
        self.sent: dict[Any, dict[Any, PricedOp]] = {}  # by place, then by message and group
        self.once = Once()  # ops and what they consist of, host times of calls and wrappers

    def on(self, machine: Factors, known: Machine | None = None, model: str = "") -> PriceBook:
        """These prices times a machine's speed factors; models are asked once for all machines.

        ``known``: what measured steps of ``model`` say of the machine; intervals rest on it.
        """
        if (machine, known, model) == (self.machine, self.known, self.model):
            return self
        return self.once(
            ("machine", machine, known, model), lambda: self._on(machine, known, model)
        )

    def _on(self, machine: Factors, known: Machine | None, model: str) -> PriceBook:
        """A new book for a machine, which shares the rows that models have priced."""
        facts = (self.gpu, self.threads, self.by_threads, self.stack, self.host)
        book = PriceBook(self.pricer, *facts)
        book.machine, book.known, book.model, book.sent = machine, known, model, self.sent
        return book

    @cached_property
    def whole_cells(self) -> tuple[str, ...]:
        """Cells of recurrent networks that run in one call: all on a GPU; a CPU's with rows."""
        if self.gpu.kind != "cpu":
            return tuple(CELLS)
        model = self.models.get("recurrent")
        step_by_step = [cell for cell in CELLS if cell != ONE_DNN]
        return tuple(c for c in step_by_step if model and model.covers(self.gpu, c, "fp32"))

    @cached_property
    def contention(self) -> float:
        """Slowdown of tasks that overlap on the device (``timeline.simulate_shared``).

        It is measured (``sweep.contention``), else 2, for taking turns. A message and compute on a
        GPU slow each other by ``beside`` instead, unless the GPU's file states a contention.
        """
        return self.gpu.contention or TAKING_TURNS

    def contention_of(self, message: PricedOp, products_frac: float) -> float:
        """Slowdown of a message and compute; ``products_frac`` of its time is products."""
        if message.beside is None:
            return self.contention
        return mixed(message.beside, products_frac)

    def beside(self, bytes_per_s: float, *, in_node: bool) -> Slowdowns | None:
        """Slowdowns of compute by a message that moves ``bytes_per_s`` over each rank's link."""
        if self.gpu.kind == "cpu" or self.gpu.contention:
            return None
        planned_sms = stack_of_row(self.stack).message_sms.get(self.gpu.architecture, 0)
        return slowdowns(self.gpu, bytes_per_s, in_node=in_node, planned_sms=planned_sms)

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
        self._add({family: points})
        return self.prices[family]

    def _add(self, points: Mapping[str, Iterable[Any]]) -> None:
        """Price those points, by family, that are still missing."""
        fresh = dict[str, list[Any]]()
        for family, own in points.items():
            prices_of_family = self.prices.setdefault(family, {})
            fresh[family] = list(dict.fromkeys(p for p in own if p not in prices_of_family))
        columns = {family: self._columns(own) for family, own in fresh.items() if own}
        if not columns:
            return

        def priced() -> dict[str, list[Any]]:
            return {name: self.expected(name, self._rows(own)) for name, own in columns.items()}

        for family, rows in self.kept(list(columns), columns, priced).items():
            count, blocks = len(fresh[family]), iter(rows)  # in the order of ``_columns``
            for threads in self.by_threads:
                warm, cold = (list(islice(blocks, count)) for _ in range(2))
                pairs = zip(fresh[family], zip(warm, cold, strict=True), strict=True)
                self.by_threads[threads].setdefault(family, {}).update(pairs)

    def _columns(self, points: Sequence[Any]) -> dict[str, list[Any]]:
        """Columns of rows to price: all points warm, then all cold, for each number of threads."""
        blocks = [(n, cache) for n in self.by_threads for cache in ("warm", "cold")]
        names = [f.name for f in fields(points[0])]
        columns = {name: [getattr(p, name) for p in points] * len(blocks) for name in names}
        columns["threads"] = [n for n, _ in blocks for _ in points]
        columns["cache"] = [cache for _, cache in blocks for _ in points]
        return columns

    def _rows(self, columns: Mapping[str, list[Any]]) -> pd.DataFrame:
        """Rows to price on this GPU for the software that is forecast."""
        return pd.DataFrame({**columns, "gpu": self.gpu.name, "stack_wanted": self.stack})

    def kept(self, families: Iterable[str], question: Any, ask: Callable[[], Any]) -> Any:
        """The models' answer ``ask()`` in plain values, kept on disk by ``question`` and device.

        ``families``: those whose models answer.
        """
        book = (self.gpu, self.threads, stack_of_row(self.stack))
        return kept_answer(self.pricer, families, (book, question), ask)

    def expected(self, family: str, rows: pd.DataFrame) -> list[dict[str, Any]]:
        """Returns price rows with means in place of medians: only means add up to a sum's mean.

        Of a log-normal time: mean = median * exp(s**2 / 2), s the standard deviation of its log
        (Duan's smearing, doi:10.2307/2288126). Outside the training range, as on an unseen GPU, all
        ops err in the same direction rather than independently, and medians stay.
        """
        priced = self.pricer.price(family, rows, {self.gpu.name: self.gpu})
        table = {str(name): column.to_numpy() for name, column in priced.items()}
        low, high = (np.log(np.maximum(table[f"predicted_us_{q}"], 1e-9)) for q in ("p10", "p90"))
        log_deviation = (high - low) / DECILES_APART * table["in_envelope"]
        table["predicted_us"] = table["predicted_us"] * np.exp(log_deviation**2 / 2)
        values = zip(*(column.tolist() for column in table.values()), strict=True)
        return [dict(zip(table, row, strict=True)) for row in values]

    def price(self, wanted: Sequence[Priceable]) -> list[PricedOp]:
        """Every op with its price; one pricer call per family."""
        all_parts = self.prefetch(wanted)
        return [self._price_once(w, parts) for w, parts in zip(wanted, all_parts, strict=True)]

    def _price_once(self, w: Priceable, parts: Sequence[Part]) -> PricedOp:
        """The op's price, computed once for ops that are equal."""
        runs = (w.cold, w.kernel, w.channels_last, w.paddable)
        key = (w.op, w.phase, w.params, w.bytes_moved, *runs)
        return self.once(("op", key), lambda: self._new(w, parts))

    def prefetch(self, wanted: Sequence[Priceable]) -> list[list[Part]]:
        """Price all parts that these ops need in one call per family; returns each op's parts."""
        parts = [self._parts(w) for w in wanted]
        by_family: dict[str, list[Any]] = {}
        for part in (part for parts_of_op in parts for part in parts_of_op):
            by_family.setdefault(part.family, []).append(part.params)
        self._add(by_family)
        return parts

    def _parts(self, w: Priceable) -> list[Part]:
        """The ops that an op is priced as: itself, its family's fallback, a copy, or none.

        If its operands may be padded, the parts of the padded product follow at the end.
        """
        key = (w.params, w.channels_last, w.params is None and w.bytes_moved)
        found: list[Part] = self.once(("parts", key), lambda: self._found_parts(w))
        return [*found, *padded_parts(w.run_by(self.gpu).params)] if self._may_pad(w) else found

    def _may_pad(self, w: Priceable) -> bool:
        """Whether inductor may pad the op's operands here: a GPU's product with a model."""
        return w.paddable and self.gpu.kind != "cpu" and "gemm" in self.models

    def _run_parts(self, w: Priceable, parts: Sequence[Part]) -> Sequence[Part]:
        """The parts of an op that run; if a product may be padded, those of the faster way."""
        if not self._may_pad(w):
            return parts
        count = len(padded_parts(w.run_by(self.gpu).params))
        own, padded = parts[:-count], parts[-count:]
        own_us = sum(self._part_us(part, w.cold) for part in own)
        padded_us = sum(self._part_us(part, w.cold) for part in padded)
        return padded if own_us > LEAST_GAIN * padded_us else own

    def _found_parts(self, w: Priceable) -> list[Part]:
        """``_parts`` without padding: the fallback, the op itself, a copy as large, or none."""
        w = w.run_by(self.gpu)
        models, on_gpu = self.models, self.gpu.kind != "cpu"
        if parts := fallback_parts(w.params, models, w.channels_last, self.gpu, self.stack):
            return parts
        if w.name in models:
            return [Part(family=w.name, params=w.params)]
        if on_gpu and models.get("elementwise") is not None:
            return [memory_copy(w.bytes_on(self.gpu))]
        return []

    def _host_call(self, w: Priceable) -> HostCall | None:
        """What a GPU's sweep measured of a call's launch; None on a CPU: op times include it."""
        model = self.models.get(w.name)
        if model is None or self.gpu.kind == "cpu":
            return None
        call = w.call_name
        return self.once(("call", w.name, call), lambda: model.host_call(self.gpu.name, call))

    def _kernel_ratio(self, w: Priceable) -> float:
        """Time of the attention kernel that runs over that of the kernels its rows measured."""
        p, family, model = w.params, w.family, self.models.get(w.name)
        if family is None or family.name != ATTENTION or self.gpu.kind == "cpu":
            return 1.0
        if p.dtype not in SIXTEEN_BIT:
            return 1.0
        stack = stack_of_row(self.stack)
        kernel = w.kernel or stack.attention_on(self.gpu, unequal=w.unequal)
        rows: Mapping[tuple[str, str], float] = {}
        gpus = {self.gpu.name: self.gpu}
        if model is not None:
            op = p.op if model.covers(self.gpu, p.op, p.dtype) else "forward"
            rows = model.row_sources(self.gpu, op, p.dtype, self.stack, family)
            gpus = {**model.source_gpus.gpus, **gpus}
        return kernel_ratio(kernel, family, p, self.gpu, rows, gpus)

    def _part_us(self, part: Part, cold: float) -> float:
        """Time of a part of an op; its share ``cold`` reads from memory, the rest from caches."""
        warm_us, cold_us = (row["predicted_us"] for row in self.prices[part.family][part.params])
        return part.times * ((1 - cold) * warm_us + cold * cold_us)

    def _roofline_us(self, w: Priceable, flops: float, parts_us: float) -> float:
        """Time in us of an op without a model: the largest of two times.

        They are its matrix products at peak, and its parts' time, or without parts the time to move
        its bytes.
        """
        bytes_us = w.bytes_on(self.gpu) / self.gpu.hbm_bytes_per_s * 1e6 + ROOFLINE_OVERHEAD_US
        peak = self.gpu.peak(getattr(w.params, "dtype", "fp32"))
        return max(parts_us or bytes_us, flops / peak * 1e6)

    def _new(self, w: Priceable, parts: Sequence[Part]) -> PricedOp:
        """Prices an op: parts added up, attention's kernel, power limit, host time of its call."""
        w, parts = w.run_by(self.gpu), self._run_parts(w, parts)
        flops = float(w.family.flops(w.params)) if w.family is not None else 0.0
        ratio, call = self._kernel_ratio(w), self._host_call(w)
        has_model = w.name in self.models
        is_modelled = has_model or (bool(parts) and all(part.checked for part in parts))
        tensors = getattr(w.params, "tensors", 1)
        times_us = [(part, ratio * self._part_us(part, w.cold)) for part in parts]
        us = sum(part_us for _, part_us in times_us)
        other_us = sum(abs(part_us) for part, part_us in times_us if not w.is_priced_as(part))
        if not has_model:
            us = self._roofline_us(w, flops, us)
            other_us = other_us if is_modelled else us
        product = w.family is not None and w.family.matmul
        if product:
            us = throttled_us(self.gpu, w.params.dtype, us, flops)
        us *= self.machine.products if product else self.machine.memory
        shares = w.assumed_shares(len(parts), min(1.0, other_us / us) if us > 0 else 0.0)
        return PricedOp(
            op=w.op,
            family=w.name if is_modelled else UNMODELLED,
            phase=w.phase,
            duration_us=us,
            flops=flops,
            kernels=max(1, round(call.kernels)) if call else 1,
            call_launches=call.launches(tensors) if call else 1.0,
            waits=w.waits,
            product=product,
            assumed=shares if ratio == 1.0 else (("attention_kernels.over_flash_2", 1.0),),
        )


@cached_by_identity
def _books(pricer: Bundle, gpu: Gpu, stack: str, host: HostMachine) -> dict[int, PriceBook]:
    """Price books by threads of a rank: on a CPU all its cores, half of them... down to 1."""
    by_threads: dict[int, Prices] = {}
    cores = gpu.sm_count if gpu.kind == "cpu" else 0
    numbers = {max(1, cores >> halvings) for halvings in range(cores.bit_length())} or {0}
    return {n: PriceBook(pricer, gpu, n, by_threads, stack, host) for n in sorted(numbers)}


def price_book(
    pricer: Bundle, gpu: Gpu, threads: int, stack: str = USUAL_STACK, host: HostMachine = REFERENCE
) -> PriceBook:
    """Return the cache of op prices for this pricer, device and number of threads.

    Calls with equal arguments get the same book, so that plans share its prices.
    """
    books = _books(pricer, gpu, stack, host)
    if threads not in books:
        books[threads] = PriceBook(pricer, gpu, threads, stack=stack, host=host)
    return books[threads]
