"""One iteration's forecast: priced ops on lanes, then the numbers a person asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from compose.ddp import PricedBucket, buckets, default_contention, price_buckets
from compose.host import HostCost, host_cost
from compose.memory import peak_bytes
from compose.plan import ParallelPlan
from compose.priced import UNMODELLED, PricedOp, price_calls
from compose.pricer import Pricer
from compose.timeline import Span, Task, simulate_shared
from microbench.hardware.spec import Gpu
from microbench.opcall import StepCapture

MATMUL_FAMILIES = {"gemm", "conv", "attention"}
SHARED = frozenset({"compute", "comm"})
BOUNDS = ("p10", "p90")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What ``predict --json`` reports of the slowest rank; iteration = compute + exposed + idle."""

    gpu: str
    plan: str
    bundle: str
    iteration_us: float
    iteration_us_p10: float
    iteration_us_p90: float
    host_us: float
    compute_us: float
    comm_us: float
    exposed_comm_us: float
    idle_us: float
    memory_bytes: int
    samples_per_s: float
    tokens_per_s: float
    mfu_frac: float
    unmodelled_frac: float
    by_family_us: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStep:
    """Everything with a duration in one rank's step."""

    ops: list[PricedOp]
    reduces: list[PricedBucket]
    host: HostCost
    gpu: Gpu
    contention: float

    def tasks(self, family: str = "", bound: str = "") -> list[Task]:
        """The step on lanes; durations of ``family`` are those of ``bound`` ("p10" or "p90").

        On a CPU the host's time is spread evenly over the compute tasks. On a GPU the host lane
        issues one op after the other (its time spread evenly too) and a kernel starts when it is
        issued and the compute lane is free. All-reduces go in after the call that readies them.
        """

        def us(item: PricedOp | PricedBucket | HostCost, name: str) -> float:
            return float(getattr(item, bound if bound and name == family else "duration_us"))

        host_us = us(self.host, "host")
        on_cpu = self.gpu.kind == "cpu"
        if not self.ops:
            return [Task(("compute" if on_cpu else "host",), host_us, name="host")]
        share_us = host_us / len(self.ops)
        waiting = list(self.reduces)
        tasks: list[Task] = []
        reduce_numbers: list[int] = []
        for op in self.ops:
            after: tuple[int, ...] = ()
            if op.phase == "optimizer":
                after = tuple(reduce_numbers)
            if not on_cpu:
                after += (len(tasks),)
                tasks.append(Task(("host",), share_us, name=f"launch {op.op}"))
            duration_us = us(op, op.family) + (share_us if on_cpu else 0.0)
            tasks.append(Task(("compute",), duration_us, after, op.op))
            compute = len(tasks) - 1
            while waiting and waiting[0].bucket.ready_after <= op.index:
                item = waiting.pop(0)
                reduce_numbers.append(len(tasks))
                tasks.append(Task(("comm",), us(item, "collective"), (compute,), "all_reduce"))
        if waiting:
            late = waiting[0].bucket
            raise ValueError(
                f"gradient {late.names[-1]!r} is ready after call {late.ready_after}; "
                f"the step has {len(self.ops)} calls"
            )
        return tasks

    def run(self, family: str = "", bound: str = "") -> tuple[list[Task], list[Span]]:
        """Tasks and when they ran."""
        tasks = self.tasks(family, bound)
        return tasks, simulate_shared(tasks, SHARED, self.contention)

    def by_family_us(self) -> dict[str, float]:
        """Time by family, ops and all-reduces each alone; the host only where it is the compute."""
        result: dict[str, float] = {}
        for op in self.ops:
            result[op.family] = result.get(op.family, 0.0) + op.duration_us
        if self.reduces:
            result["collective"] = sum(r.duration_us for r in self.reduces)
        if self.gpu.kind == "cpu" and self.host.duration_us:
            result["host"] = self.host.duration_us
        return dict(sorted(result.items(), key=lambda item: -item[1]))

    def unmodelled_us(self) -> float:
        """Time that no learned model priced: ops, all-reduces, and the host on a CPU."""
        us = sum(op.duration_us for op in self.ops if op.family == UNMODELLED)
        us += sum(r.duration_us for r in self.reduces if not r.modelled)
        return us + (self.host.assumed_us if self.gpu.kind == "cpu" else 0.0)


def price_step(
    capture: StepCapture,
    pricer: Pricer,
    gpu: Gpu,
    plan: ParallelPlan,
    threads: int,
    contention: float | None = None,
) -> PricedStep:
    """The step of one data-parallel rank, priced; all ranks are alike, so one stands for all.

    ``contention`` is stated in ``compose.ddp``; None takes its default for the device.
    """
    plan.check_supported()
    found = buckets(capture.parameters, plan.bucket_bytes) if plan.dp > 1 else []
    counts = dict(capture.host)
    if gpu.kind != "cpu":
        counts["launch"] = len(capture.calls)
    return PricedStep(
        ops=price_calls(capture, pricer, gpu, threads),
        reduces=price_buckets(found, pricer, gpu, plan, threads),
        host=host_cost(counts, pricer, gpu, threads),
        gpu=gpu,
        contention=default_contention(gpu) if contention is None else contention,
    )


def forecast(
    capture: StepCapture,
    pricer: Pricer,
    gpu: Gpu,
    plan: ParallelPlan,
    *,
    bundle_name: str,
    threads: int,
    optimizer: str,
) -> Forecast:
    """The forecast of one iteration.

    Interval: errors within one family are taken as fully correlated, so the step is run again with
    the whole family at its bound; errors of different families are taken as independent, so the
    iteration's changes add as root of the sum of squares. mfu_frac counts the flops of gemm, conv
    and attention against the dense peak of their dtype.
    """
    step = price_step(capture, pricer, gpu, plan, threads)
    tasks, spans = step.run()
    iteration_us = max((s.end_us for s in spans), default=0.0)
    compute = _lane(tasks, spans, "compute")
    comm = _lane(tasks, spans, "comm")
    compute_us, comm_us = _covered_us(compute), _covered_us(comm)
    exposed_us = _covered_us([*compute, *comm]) - compute_us
    low_us, high_us = (_bound_change_us(step, bound, iteration_us) for bound in BOUNDS)
    families_us = step.by_family_us()
    total_us = sum(families_us.values())
    per_s = 1e6 / iteration_us if iteration_us else 0.0  # us to s, at the edge
    ideal_us = 1e6 * sum(
        op.flops / gpu.peak(op.dtype) for op in step.ops if op.flops_family in MATMUL_FAMILIES
    )
    return Forecast(
        gpu=gpu.name,
        plan=str(plan),
        bundle=bundle_name,
        iteration_us=iteration_us,
        iteration_us_p10=max(0.0, iteration_us - low_us),
        iteration_us_p90=iteration_us + high_us,
        host_us=step.host.duration_us,
        compute_us=compute_us,
        comm_us=comm_us,
        exposed_comm_us=exposed_us,
        idle_us=max(0.0, iteration_us - compute_us - exposed_us),
        memory_bytes=peak_bytes(capture, optimizer, plan.dp),
        samples_per_s=capture.samples * plan.dp * per_s,
        tokens_per_s=capture.tokens * plan.dp * per_s,
        mfu_frac=ideal_us / iteration_us if iteration_us else 0.0,
        unmodelled_frac=step.unmodelled_us() / total_us if total_us else 0.0,
        by_family_us=families_us,
    )


def _bound_change_us(step: PricedStep, bound: str, iteration_us: float) -> float:
    """How far the iteration moves towards one bound, families independent."""
    squares = 0.0
    for family in sorted({*step.by_family_us(), "host"}):
        _, spans = step.run(family, bound)
        squares += (max((s.end_us for s in spans), default=0.0) - iteration_us) ** 2
    return sqrt(squares)


def _lane(tasks: Sequence[Task], spans: Sequence[Span], lane: str) -> list[Span]:
    return [s for t, s in zip(tasks, spans, strict=True) if lane in t.lanes]


def _covered_us(spans: Sequence[Span]) -> float:
    """Time during which at least one of the spans runs."""
    total = end = 0.0
    for span in sorted(spans, key=lambda s: (s.start_us, s.end_us)):
        total += max(0.0, span.end_us - max(end, span.start_us))
        end = max(end, span.end_us)
    return total
