"""Forecasts one iteration: the numbers that ``predict`` reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import exp, sqrt
from typing import Any

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.machines.factors import NAMES
from itercast.compose.machines.state import DEVIATES
from itercast.compose.machines.typical import typical
from itercast.compose.notes import PRACTISED, notes, without_effect
from itercast.compose.parallel.device_memory import MISFITS, lacking_on_host, room_bytes, verdict
from itercast.compose.parallel.placement import Cluster, cluster_for
from itercast.compose.pricing.layer_prices import price_model
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import UNMODELLED
from itercast.compose.simulate.breakdown import Outcome
from itercast.compose.simulate.iteration import evaluate
from itercast.compose.simulate.rank import Rank
from itercast.microbench.hardware.node import Node
from itercast.microbench.hardware.stack import USUAL
from itercast.microbench.ops import families

MESSAGES = "collective"  # the family of messages
CONVOLUTION = "aten.convolution.default"  # its second argument is the weight
HALF_WIDTH: float = assumed(__file__, "half_width")  # of steps on a CPU
IN_PRACTICE: float = assumed(__file__, "in_practice")  # trainings without text beside benchmarks
OF_KERNELS = ((True, "products"), (False, "memory"))  # a machine's factor of products, of others
# Facts of a simulated iteration that a forecast states as they are.
SIMULATED: tuple[str, ...] = (
    "iteration_us",
    "compute_us",
    "comm_us",
    "exposed_comm_us",
    "idle_us",
    "memory_bytes",
)
SIMULATED += ("assumed_by_us", "host_memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What ``predict --json`` reports of the slowest rank; iteration = compute + exposed + idle.

    The 80 % interval is from iteration / e**h to iteration * e**h: on a CPU h is ``HALF_WIDTH``, on
    GPUs that of a machine of which as much is known as of this one (``itercast.compose.machines``),
    by ``parts_frac``, the share of the iteration that each of a machine's factors scales, wider by
    the share of families whose models err by more than machines differ.
    ``idle_by_us`` splits idle time into host gaps, pipeline bubble and waiting for other stages.
    ``host_us``: all work of the rank's host in a step, whether or not the device waits for it.
    ``host_held_us``: how long a program's host is busy or waits for the GPU from one batch to the
    next; 0 where its waits are not known.
    ``memory_room_bytes``: memory for tensors, without that of CUDA's context, NCCL and torch's
    allocator; ``fits``: the peak memory is within it; ``memory_verdict``: the same as far as the
    memory model's error lets it be told, and why a host has too little. ``host_memory_bytes``: what
    the fullest rank offloads to its host. ``host``: the GPU's host, empty on a CPU. ``energy_j``:
    of all GPUs in the iteration at their power limit, an upper bound; 0 where the limit is not
    stated. ``stack``: the software that is forecast. ``network``: the node, links and network that
    messages are priced by; empty for one rank and on a CPU. ``lengths``: of sequences that are
    unlike (``itercast.extras.lengths.sequences.Lengths``); tokens are then those that are no
    padding. ``cluster``: on unlike GPUs (``itercast.extras.clusters``) what each group has, and
    the time with equal shares, 0 where there are none. ``notes``: what to know of how the step was
    forecast (``itercast.compose.notes``). ``in_practice``: how many times as long as forecast steps
    of such networks took in trainings that were reported, which benchmarks do not show; 1 where
    they took as long, or where more is known of the machine.

    ``assumed_frac`` is the share of the iteration that rests on assumed numbers: (compute and
    exposed communication priced by an assumption + host gaps, as far as the host's time is assumed)
    / iteration. Each of the three counts by the share of assumed time in all that its lane runs,
    hidden or not; bubble and waiting count by the share of the rest. By an assumption are priced:
    host events without a model, ops priced as other ops or by a roofline, attention kernels slower
    than those measured, collectives without a model, what scaling beyond the measured groups adds,
    messages over a network whose rate is not stated, and offload copies. ``assumed_by_us`` is that
    time by assumption. Not counted: assumptions that only shift modelled times, such as how warm
    the cache is or how much messages and compute slow each other.
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
    assumed_frac: float
    by_family_us: dict[str, float]
    energy_j: float = 0.0
    idle_by_us: dict[str, float] = field(default_factory=dict)
    assumed_by_us: dict[str, float] = field(default_factory=dict)
    memory_by_bytes: dict[str, int] = field(default_factory=dict)
    world_size: int = 1
    memory_room_bytes: int = 0
    fits: bool = True
    memory_verdict: str = ""
    host_memory_bytes: int = 0
    host: str = ""
    host_held_us: float = 0.0
    stack: str = USUAL
    network: str = ""
    lengths: dict[str, float] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    parts_frac: dict[str, float] = field(default_factory=dict)
    in_practice: float = 1.0

    @property
    def lanes_us(self) -> tuple[float, ...]:
        """Compute, exposed communication, bubble, host gaps and waiting of the slowest rank.

        They add up to the iteration.
        """
        idle = (self.idle_by_us.get(name, 0.0) for name in ("bubble", "host", "waiting"))
        return (self.compute_us, self.exposed_comm_us, *idle)


def forecast(
    step: StepCapture,
    plan: ParallelPlan,
    book: PriceBook,
    node: Node | None = None,
    bundle_name: str = "",
) -> Forecast:
    """The forecast of one iteration under a plan.

    ``step`` is one micro-batch of one replica with a rank's part of the sequence: its samples are
    the replica's over ``plan.microbatches``, its length the whole over ``plan.cp``. Without a node
    eight GPUs share one. ``mfu_frac`` counts the flops of products (gemm, conv, attention,
    recurrent and sparse ones) of all ranks against the dense peak of their dtype. The host's time
    is not part of ``unmodelled_frac``; where it is assumed, it is part of ``assumed_frac``.
    """
    rank = rank_of(step, plan, book, cluster_for(plan, book.gpu, node))
    replicas, lengths = plan.microbatches * plan.participants, dict(step.lengths)
    tokens = step.tokens * plan.cp * replicas
    if lengths:
        tokens = round(step.samples * replicas * lengths["real_tokens"])
    numbers = report(
        evaluate(rank, step.optimizer),
        book,
        plan=str(plan),
        bundle_name=bundle_name,
        network=rank.cluster.network,
        room=room_bytes(book.gpu, plan),
        world_size=plan.world_size,
        samples=step.samples * replicas,
        tokens=tokens,
    )
    remarks = (*notes(step, plan, book.stack), *without_effect(plan, rank.cluster))
    if lacking := lacking_on_host(rank.cluster, numbers.host_memory_bytes):
        numbers = replace(numbers, fits=False, memory_verdict=f"{MISFITS}: {lacking}")
    numbers = replace(numbers, lengths=lengths, notes=remarks)
    return numbers if step.optimizer == "none" else as_trained(numbers, book, step.calls)


def as_trained(numbers: Forecast, book: PriceBook, calls: Iterable[OpCall]) -> Forecast:
    """Adds ``in_practice`` to a training step's forecast: for images, sound or latents, not text.

    Such networks are known by convolutions over neighbouring places; kernels of one place are
    products.
    """
    is_measured = book.gpu.kind == "cpu" or book.known is not None
    kernels = (call.args[1].shape[2:] for call in calls if call.op == CONVOLUTION)
    if is_measured or numbers.tokens_per_s or not any(max(sizes) > 1 for sizes in kernels):
        return numbers
    notes = (*numbers.notes, PRACTISED.format(IN_PRACTICE))
    return replace(numbers, in_practice=IN_PRACTICE, notes=notes)


def rank_of(step: StepCapture, plan: ParallelPlan, book: PriceBook, cluster: Cluster) -> Rank:
    """Prices a step for a rank that holds all layers, as if the plan had one pipeline stage."""
    model = price_model(step, plan, book, cluster)
    return Rank(
        plan=plan,
        layers=model.each_layer,
        model=model,
        book=book,
        cluster=cluster,
        synchronised=step.synchronised,
    )


def report(
    outcome: Outcome,
    book: PriceBook,
    *,
    plan: str,
    bundle_name: str,
    network: str,
    room: int,
    world_size: int,
    samples: float,
    tokens: float,
) -> Forecast:
    """Turns a simulated iteration into a forecast; samples and tokens are those of all ranks."""
    parts = _parts_frac(outcome)
    interval_ratio = exp(_half_width(parts, _families_frac(outcome), book))
    per_s = 1e6 / outcome.iteration_us if outcome.iteration_us else 0.0
    idle = {"host": outcome.host_gap_us, "bubble": outcome.bubble_us, "waiting": outcome.waiting_us}
    return Forecast(
        gpu=book.gpu.name,
        plan=plan,
        bundle=bundle_name,
        **{name: getattr(outcome, name) for name in SIMULATED},
        iteration_us_p10=outcome.iteration_us / interval_ratio,
        iteration_us_p90=outcome.iteration_us * interval_ratio,
        host_us=outcome.tally.host.total_us,
        samples_per_s=samples * per_s,
        tokens_per_s=tokens * per_s,
        mfu_frac=outcome.matmul_s * per_s,
        unmodelled_frac=outcome.tally.unmodelled_frac,
        assumed_frac=min(1.0, sum(outcome.assumed_by_us.values()) * per_s * 1e-6),
        by_family_us=dict(sorted(outcome.tally.us.items(), key=lambda item: -item[1])),
        energy_j=world_size * book.gpu.power_w * outcome.iteration_us * 1e-6,
        idle_by_us=idle,
        memory_by_bytes=outcome.memory,
        world_size=world_size,
        memory_room_bytes=room,
        fits=outcome.memory_bytes <= room,
        memory_verdict=verdict(outcome.memory_bytes, room),
        host="" if book.gpu.kind == "cpu" else book.host.name,
        stack=book.stack,
        network=network,
        parts_frac=parts,
    )


def _busy_us(outcome: Outcome) -> float:
    """Time of kernels, of messages that no compute hides, of waiting for the host; 1 if none."""
    return outcome.compute_us + outcome.exposed_comm_us + outcome.host_gap_us or 1.0


def _parts_frac(outcome: Outcome) -> dict[str, float]:
    """How much a step's log time changes with the log of each machine factor, by ``NAMES``.

    Of the busy time each factor has the share that it scales; these add up to 1. A pipeline's
    bubble and waiting for slower stages grow with them.
    """
    tally, busy_us = outcome.tally, _busy_us(outcome)
    product_us = sum(us for name, us in tally.us.items() if _is_product(name))
    compute, messages = outcome.compute_us / busy_us, outcome.exposed_comm_us / busy_us
    products = compute * min(1.0, product_us / (tally.compute.total_us or 1.0))
    network = messages * tally.far_us / (tally.comm.total_us or 1.0)
    parts = {
        "products": products,
        "memory": compute - products,
        "links": messages - network,
        "network": network,
        "host": outcome.host_gap_us / busy_us,
    }
    return {name: parts[name] for name in NAMES}


def _families_frac(outcome: Outcome) -> dict[str, float]:
    """The share of the busy time of a step on GPUs that each family's kernels take."""
    tally = outcome.tally
    frac_per_us = outcome.compute_us / _busy_us(outcome) / (tally.compute.total_us or 1.0)
    return {name: min(1.0, frac_per_us * us) for name, us in tally.us.items() if name != MESSAGES}


def _is_product(family: str) -> bool:
    """Whether a family's ops are matrix products, to which a machine's factor of these applies."""
    return family in families() and families()[family].matmul


def _half_width(parts: Mapping[str, float], shares: Mapping[str, float], book: PriceBook) -> float:
    """Half width of the 80 % interval in log time, from the step's parts and its machine.

    Variance = that of the machine's factors + sum over families of share**2 * max(0, variance of
    the family's model - variance of its factor). The sum is left out if steps of this model were
    measured on this machine: they tell how far its ops are off.
    """
    if book.gpu.kind == "cpu":
        return HALF_WIDTH
    machine = book.known or typical()
    sensitivity = tuple(parts.values())
    if book.model and book.model in machine.models:
        return machine.half_width(sensitivity, book.model)
    spread = dict(zip(NAMES, machine.typical.spread, strict=True))
    of_factor = {is_product: spread[name] for is_product, name in OF_KERNELS}
    variances = [
        share**2 * max(0.0, _deviation_of(name, book) ** 2 - of_factor[_is_product(name)] ** 2)
        for name, share in shares.items()
    ]
    return machine.half_width(sensitivity, book.model, sqrt(sum(variances)))


def _deviation_of(family: str, book: PriceBook) -> float:
    """Standard deviation of the log error of a family's ops, from its model's 80 % interval.

    0 for a family without a model; ops that no family prices count as those of the worst model.
    """
    errors = {name: model.half_width for name, model in book.models.items() if model is not None}
    worst = max(errors.values(), default=0.0) if family == UNMODELLED else 0.0
    return errors.get(family, worst) / DEVIATES
