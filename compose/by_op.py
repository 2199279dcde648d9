"""One rank's step op by op on lanes: small steps, traces, and what folding is checked against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

from compose.collectives import cluster, price_messages
from compose.ddp import Sync, ddp_step, default_contention
from compose.engines import launches
from compose.host import host_cost
from compose.plan import ParallelPlan
from compose.priced import PricedOp, Pricer, price_book, price_calls
from compose.timeline import Span, Task, simulate, simulate_shared
from microbench.hardware.spec import Gpu
from microbench.opcall import StepCapture

SHARED = frozenset({"compute", "comm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStep:
    """Everything with a duration in one rank's step; ``messages`` are those of ``syncs``."""

    ops: Sequence[PricedOp]
    host: PricedOp
    on_cpu: bool
    contention: float
    syncs: Sequence[Sync] = ()
    messages: Sequence[PricedOp] = ()

    def priced(self) -> list[PricedOp]:
        """What adds up to the time by family; the host counts only where it is the compute lane."""
        host = [self.host] if self.on_cpu and self.host.duration_us else []
        return [*self.ops, *self.messages, *host]

    def run(self) -> tuple[list[Task], list[Span]]:
        """Tasks and when they ran; ``timeline.trace_json`` draws them."""
        syncs = list(zip(self.syncs, self.messages, strict=True))
        tasks = lanes(self.ops, self.host.duration_us, self.on_cpu, syncs)
        return tasks, simulate_shared(tasks, SHARED, self.contention)


def lanes(
    ops: Sequence[PricedOp],
    host_us: float,
    on_cpu: bool,
    syncs: Sequence[tuple[Sync, PricedOp]] = (),
) -> list[Task]:
    """The step as tasks on lanes, the host's time spread evenly over the ops.

    On a CPU it lengthens the compute tasks. On a GPU the host lane issues one op after the other
    and a kernel starts when it is issued and the compute lane is free. Collectives run on the comm
    lane in the order of ``syncs``.
    """
    if not ops:
        return [Task(("compute" if on_cpu else "host",), host_us, name="host")]
    share_us = host_us / len(ops)
    waiting = sorted(syncs, key=lambda s: s[0].after)
    awaited: dict[int, list[int]] = {}
    tasks: list[Task] = []
    for index, op in enumerate(ops):
        after = tuple(awaited.pop(index, ()))
        if not on_cpu:
            after += (len(tasks),)
            tasks.append(Task(("host",), share_us, name=f"launch {op.op}"))
        duration_us = op.duration_us + (share_us if on_cpu else 0.0)
        compute = len(tasks)
        tasks.append(Task(("compute",), duration_us, after, op.op))
        while waiting and waiting[0][0].after <= index:
            sync, priced = waiting.pop(0)
            awaited.setdefault(sync.before, []).append(len(tasks))
            tasks.append(Task(("comm",), priced.duration_us, (compute,), priced.op))
    return tasks


def eager_timeline(ops: Sequence[PricedOp], launch_us: float) -> tuple[float, float]:
    """End and idle time of the compute lane when the host launches an op every ``launch_us``."""
    tasks = lanes(ops, launch_us * len(ops), on_cpu=False)
    end_us = max(s.end_us for s in simulate(tasks))
    return end_us, end_us - sum(op.duration_us for op in ops)


def interval(ops: Iterable[PricedOp], iteration_us: float) -> tuple[float, float]:
    """The 10 and 90 % bounds of the iteration.

    Errors within a family are taken as fully correlated and add; errors of different families are
    taken as independent and add in squares. Time hidden behind other lanes counts as if it were
    exposed: the interval is then too wide.
    """
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for op in ops:
        low[op.family] = low.get(op.family, 0.0) + op.duration_us - op.low_us
        high[op.family] = high.get(op.family, 0.0) + op.high_us - op.duration_us
    below_us, above_us = (sqrt(sum(us * us for us in side.values())) for side in (low, high))
    return max(0.0, iteration_us - below_us), iteration_us + above_us


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
    syncs: list[Sync] = []
    if plan.dp > 1:
        capture, syncs = ddp_step(capture)
    counts = dict(capture.host)
    if gpu.kind != "cpu":
        counts["launch"] = launches(capture)
    messages = [sync.message for sync in syncs]
    book = price_book(pricer, gpu, threads)
    return PricedStep(
        ops=price_calls(capture, book),
        host=host_cost(counts, pricer, gpu, threads),
        on_cpu=gpu.kind == "cpu",
        contention=default_contention(gpu) if contention is None else contention,
        syncs=syncs,
        messages=price_messages(messages, book, cluster(plan, gpu)),
    )
