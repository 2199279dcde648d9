"""One iteration's forecast: the numbers a person asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from compose.breakdown import covered_us
from compose.by_op import interval, price_step
from compose.collectives import Cluster, cluster
from compose.ddp import default_contention
from compose.evaluate import Outcome, evaluate
from compose.memory import peak_bytes
from compose.plan import ParallelPlan
from compose.priced import UNMODELLED, PriceBook, Pricer, price_book
from compose.rank import Rank
from compose.step import MATMUL_FAMILIES, PricedModel, price_model
from compose.timeline import Span, Task
from microbench.hardware.node import Node
from microbench.hardware.spec import Gpu
from microbench.opcall import StepCapture
from microbench.ops import find_family


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What ``predict --json`` reports of the slowest rank; iteration = compute + exposed + idle.

    ``idle_by_us`` parts idle time into host gaps, bubble and waiting; ``fits`` is whether memory
    does.
    """

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
    idle_by_us: dict[str, float] = field(default_factory=dict)
    memory_by_bytes: dict[str, int] = field(default_factory=dict)
    world_size: int = 1
    fits: bool = True


def forecast(
    capture: StepCapture,
    pricer: Pricer,
    gpu: Gpu,
    plan: ParallelPlan,
    *,
    bundle_name: str,
    threads: int,
    optimizer: str,
    node: Node | None = None,
) -> Forecast:
    """The forecast of one iteration under a plan.

    ``capture`` is one micro-batch of one replica with a rank's part of the sequence: its samples
    are the replica's over ``plan.microbatches``, its length the whole over ``plan.cp``. Without a
    node eight GPUs share one. ``mfu_frac`` counts the flops of gemm, conv and attention against the
    dense peak of their dtype. Assumed host costs are not ops and not part of ``unmodelled_frac``.
    """
    if is_by_op(capture, plan, node):
        return _by_op(capture, pricer, gpu, plan, bundle_name, threads, optimizer)
    book, where = price_book(pricer, gpu, threads), cluster(plan, gpu, node)
    model = price_model(capture, plan, book, where)
    outcome = evaluate(rank_of(plan, model, book, where), optimizer)
    return report(outcome, capture, plan, model, book, bundle_name)


def is_by_op(capture: StepCapture, plan: ParallelPlan, node: Node | None) -> bool:
    """Whether every op of the step is a task: one process or plain DDP."""
    return plan.plain and not capture.repeats and node is None


def timeline(
    capture: StepCapture,
    pricer: Pricer,
    gpu: Gpu,
    plan: ParallelPlan,
    *,
    threads: int,
    optimizer: str,
    node: Node | None = None,
) -> tuple[Sequence[Task], Sequence[Span]]:
    """When each task of ``forecast`` runs; of a pipeline the last micro-batch and the optimizer."""
    if is_by_op(capture, plan, node):
        return price_step(capture, pricer, gpu, plan, threads).run()
    book, where = price_book(pricer, gpu, threads), cluster(plan, gpu, node)
    model = price_model(capture, plan, book, where)
    outcome = evaluate(rank_of(plan, model, book, where), optimizer)
    return outcome.tasks, outcome.spans


def rank_of(plan: ParallelPlan, model: PricedModel, book: PriceBook, where: Cluster) -> Rank:
    """A rank with all of the model's layers, under the device's stated contention."""
    layers = tuple(x for x in model.layers for _ in range(x.layer.count))
    contention = default_contention(book.gpu)
    return Rank(
        plan=plan, layers=layers, model=model, book=book, where=where, contention=contention
    )


def report(
    found: Outcome,
    capture: StepCapture,
    plan: ParallelPlan,
    model: PricedModel,
    book: PriceBook,
    bundle_name: str,
) -> Forecast:
    """An outcome in the words of the command line."""
    low_us, high_us = found.tally.bounds(found.iteration_us)
    per_s = 1e6 / found.iteration_us if found.iteration_us else 0.0  # us to s, at the edge
    replicas = plan.microbatches * plan.dp
    idle = {"host": found.host_gap_us, "bubble": found.bubble_us, "waiting": found.waiting_us}
    return Forecast(
        gpu=book.gpu.name,
        plan=str(plan),
        bundle=bundle_name,
        iteration_us=found.iteration_us,
        iteration_us_p10=low_us,
        iteration_us_p90=high_us,
        host_us=model.host_us * plan.microbatches,
        compute_us=found.compute_us,
        comm_us=found.comm_us,
        exposed_comm_us=found.exposed_comm_us,
        idle_us=found.idle_us,
        memory_bytes=found.memory_bytes,
        samples_per_s=capture.samples * replicas * per_s,
        tokens_per_s=capture.tokens * plan.cp * replicas * per_s,
        mfu_frac=found.matmul_s * per_s,
        unmodelled_frac=found.tally.unmodelled_frac,
        by_family_us=dict(sorted(found.tally.us.items(), key=lambda item: -item[1])),
        idle_by_us=idle,
        memory_by_bytes=found.memory,
        world_size=plan.world_size,
        fits=found.memory_bytes <= book.gpu.hbm_bytes,
    )


def _by_op(
    capture: StepCapture,
    pricer: Pricer,
    gpu: Gpu,
    plan: ParallelPlan,
    bundle_name: str,
    threads: int,
    optimizer: str,
) -> Forecast:
    """One process or plain DDP, every op a task."""
    step = price_step(capture, pricer, gpu, plan, threads)
    tasks, spans = step.run()
    iteration_us = max(s.end_us for s in spans)
    compute, comm = (_lane(tasks, spans, name) for name in ("compute", "comm"))
    compute_us = covered_us(compute)
    exposed_us = covered_us([*compute, *comm]) - compute_us
    idle_us = max(0.0, iteration_us - compute_us - exposed_us)  # not -1e-12 from rounding
    low_us, high_us = interval(step.priced(), iteration_us)
    families_us: dict[str, float] = {}
    for op in step.priced():
        families_us[op.family] = families_us.get(op.family, 0.0) + op.duration_us
    total_us = sum(families_us.values())
    per_s = 1e6 / iteration_us if iteration_us else 0.0  # us to s, at the edge
    memory = peak_bytes(capture, optimizer, plan.dp)
    return Forecast(
        gpu=gpu.name,
        plan=str(plan),
        bundle=bundle_name,
        iteration_us=iteration_us,
        iteration_us_p10=low_us,
        iteration_us_p90=high_us,
        host_us=step.host.duration_us,
        compute_us=compute_us,
        comm_us=covered_us(comm),
        exposed_comm_us=exposed_us,
        idle_us=idle_us,
        memory_bytes=memory,
        samples_per_s=capture.samples * plan.dp * per_s,
        tokens_per_s=capture.tokens * plan.dp * per_s,
        mfu_frac=_matmul_s(capture, gpu) * per_s,
        unmodelled_frac=families_us.get(UNMODELLED, 0.0) / total_us if total_us else 0.0,
        by_family_us=dict(sorted(families_us.items(), key=lambda item: -item[1])),
        idle_by_us={"host": idle_us, "bubble": 0.0, "waiting": 0.0},
        world_size=plan.dp,
        fits=memory <= gpu.hbm_bytes,
    )


def _matmul_s(capture: StepCapture, gpu: Gpu) -> float:
    """Seconds the matrix products would take at peak."""
    total_s = 0.0
    for call in capture.calls:
        family, params = find_family(call)
        if family is not None and family.name in MATMUL_FAMILIES:
            total_s += float(family.flops(params)) / gpu.peak(params.dtype)
    return total_s


def _lane(tasks: list[Task], spans: list[Span], lane: str) -> list[Span]:
    return [s for t, s in zip(tasks, spans, strict=True) if lane in t.lanes]
