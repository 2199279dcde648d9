"""One rank of a plan: what it holds, and the tasks that its program puts on lanes.

Lanes: host, compute, comm, a second comm lane for messages among groups that shard, and h2d and d2h
for offloading; parameters in host memory are updated on the host lane. Ops between two points where
lanes wait for each other are one task (``itercast.compose.pricing.work``): a step has about as many
tasks as messages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType

from itercast.capture.base.assumptions import assumed
from itercast.capture.plan import ParallelPlan
from itercast.capture.step import update_of
from itercast.compose.graph.identity_cache import Once, once_of
from itercast.compose.machines.contention import Slowdowns
from itercast.compose.parallel.mixed_precision import half_dtype
from itercast.compose.parallel.placement import Cluster
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.host import on_host
from itercast.compose.pricing.layer_prices import PricedLayer, PricedModel
from itercast.compose.pricing.optimizer import LOOPED, has_lists
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import UNMODELLED, PricedOp
from itercast.compose.pricing.work import Step, Work
from itercast.compose.simulate.data_parallel import (
    PRECISE,
    LayerBucket,
    Strategy,
    by_software,
    strategy_of,
)
from itercast.compose.simulate.timeline import SHARED, Span, Task, simulate_shared
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.hardware.stack import stack_of_row

OFFLOAD_FRAC: Mapping[str, float] = assumed(__file__, "offload_frac")  # of the peak rate
OTHERS = "other micro-batches"  # name of a rank's work on them while backward of one pauses
Pause = tuple[float, float]  # us from the program's start to its end, us of such work
AMONG_GROUPS = "comm groups"  # lane of messages among groups that shard (HSDP): a stream apart
MESSAGES = ("comm", AMONG_GROUPS)  # lanes of messages between ranks


def host_copy_us(nbytes: float, gpu: Gpu) -> float:
    """Time of a copy between a GPU and its host over PCIe; inside memory if they share it."""
    pcie_bytes_per_s = gpu.pcie_bytes_per_s * OFFLOAD_FRAC["pcie"]
    rate = pcie_bytes_per_s or gpu.hbm_bytes_per_s * OFFLOAD_FRAC["memory"]
    return nbytes / rate * 1e6


def host_copy(way: str, nbytes: float, gpu: Gpu) -> PricedOp:
    """A copy between a GPU and its host: to the GPU ("h2d"), or back ("d2h")."""
    return PricedOp(
        op=way,
        family=UNMODELLED,
        phase="comm",
        duration_us=host_copy_us(nbytes, gpu),
        assumed=(("rank.offload_frac", 1.0),),
        nbytes=nbytes,
    )


@dataclass
class Lanes:
    """Tasks of one rank, collected lane by lane as they are added.

    ``done``: the tasks after which all compute so far is done; ``waits``: messages that the next
    compute task waits for. ``ranks_per_core``: ranks that share a core of a CPU, by which compute
    is slower. ``ahead``: the host launches all before the device comes to it, so that only the sum
    of its time bounds the program, until it waits for an op.
    """

    on_cpu: bool
    ranks_per_core: float = 1.0
    ahead: bool = False
    lane: str = "compute"
    tasks: list[Task] = field(default_factory=list)
    done: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()
    host: tuple[int, ...] = ()
    comm_us: float = 0.0  # collectives within the compute lane
    messages: int = 0  # so far, from and to other ranks

    def _add(
        self,
        lane: str,
        us: float,
        after: tuple[int, ...],
        name: str,
        phase: str = "",
        nbytes: float = 0.0,
        once: Hashable = None,
        products_frac: float = 0.0,
        beside: Slowdowns | None = None,
        nodes: int = 0,
    ) -> int:
        """Add a task; returns its number."""
        kind = (products_frac, beside, nodes)
        self.tasks.append(Task((lane,), us, after, name, phase, nbytes, once, *kind))
        return len(self.tasks) - 1

    def _ready(self) -> tuple[int, ...]:
        """The tasks that the lane's next task waits for; on a CPU the host's tasks too."""
        after, self.waits = self.done + self.waits, ()
        if self.on_cpu:
            after, self.host = after + self.host, ()
        return after

    def work(self, work: Work, name: str) -> None:
        """Add ops in a row; they start when compute is free and awaited messages have arrived.

        A ``path`` task, on its own lane, is their time from the first launch if launches are the
        bound.
        """
        if work == Work():
            return
        if work.steps:
            for step in work.steps:
                self._op(step)
            return
        after = self._ready()
        self.comm_us += work.comm_us
        busy_us = self.ranks_per_core * (work.lane_us - work.comm_us)
        us = work.comm_us + busy_us
        compute = self._add(self.lane, us, after, name, products_frac=work.products_frac)
        self.done = (compute,)
        if not self.on_cpu:
            self.ahead = self.ahead and work.stall_us < 0
            if not self.ahead:
                path = f"path {len(self.tasks)}"
                self.done += (self._add(path, work.path_us, self.host, f"launch {name}"),)
            self.host = (self._add("host", work.host_us, self.host, f"launch {name}"),)
            if work.stall_us > 0:
                for us in (work.wait_us, work.stall_us):
                    self._add(f"path {len(self.tasks)}", us, after, name)
                self.host += (len(self.tasks) - 2,)
                self.done += (len(self.tasks) - 1,)

    def _op(self, op: Step) -> None:
        """Add an op, as one task per kernel; on a CPU its host time makes it longer."""
        self.comm_us += op.us if op.comm else 0.0
        slower = 1.0 if op.comm else self.ranks_per_core
        for _ in range(op.kernels):
            after = self._ready()
            us, launch_us = slower * op.us / op.kernels, op.launch_us / op.kernels
            if self.on_cpu:
                us += self.ranks_per_core * launch_us
            else:
                self.host = (self._add("host", launch_us, self.host, f"launch {op.name}"),)
                after += () if self.ahead else self.host
            kind = (op.phase, op.nbytes, None, float(op.product))
            self.done = (self._add(self.lane, us, after, op.name, *kind),)
        if op.waits and not self.on_cpu:
            self.host, self.ahead = self.host + self.done, False

    def send(self, op: PricedOp, lane: str = "comm", after: tuple[int, ...] | None = None) -> int:
        """Add a message that starts once all compute so far (or ``after``) is done.

        Messages between ranks get equal numbers (``once``) on all ranks, as all send the same.
        """
        once: Hashable = None
        if lane in MESSAGES:
            self.messages += 1
            once = self.messages
        return self._message(op, lane, self.done if after is None else after, once)

    def _message(self, op: PricedOp, lane: str, after: tuple[int, ...], once: Hashable) -> int:
        """Add a message; ``once``: equal on all ranks that take part in it."""
        us, facts = op.duration_us, (op.phase, op.nbytes, once)
        return self._add(lane, us, after, op.op, *facts, beside=op.beside, nodes=op.nodes)

    def on_host(self, op: PricedOp, after: Iterable[int]) -> None:
        """Add work of the host's own, after these tasks and what it launches before."""
        self.ahead = False
        self.host = (self._add("host", op.duration_us, (*self.host, *after), op.op),)

    def resume(self, at_us: float, busy_us: float, products_frac: float) -> None:
        """Let compute go on at ``at_us`` of the program, and after ``busy_us`` of other work."""
        after = self._ready()
        busy = self._add(self.lane, busy_us, after, OTHERS, products_frac=products_frac)
        self.done = (busy,)
        self.wait([self._add(f"path {len(self.tasks)}", at_us, (), OTHERS)])

    def wait(self, tasks: Iterable[int]) -> None:
        """Let the next compute task wait for these."""
        self.waits += tuple(tasks)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a stage: its layers in forward order, equal ones repeated.

    ``starts``: the layers at which its second and further virtual stages begin. ``kin``: how many
    ranks are like this one, if other kinds of ranks are simulated beside it; else 0.
    ``synchronised``: see ``StepCapture``.
    """

    plan: ParallelPlan
    layers: tuple[PricedLayer, ...]
    starts: tuple[int, ...] = ()
    model: PricedModel
    book: PriceBook
    cluster: Cluster
    kin: float = 0
    synchronised: bool = False

    @cached_property
    def ranks_per_core(self) -> float:
        """How many ranks compute on each core of a CPU, the mean over a step; 1 on GPUs.

        In a pipeline 1, 2, ... stages are busy while it fills, and fewer again while it drains.
        """
        plan, cores = self.plan, self.book.gpu.sm_count
        if self.book.gpu.kind != "cpu":
            return 1.0
        if self.kin:
            return max(1.0, self.kin * self.book.threads / cores)
        micro, threads_of_stage = plan.microbatches, plan.cpu_ranks // plan.pp * self.book.threads
        slots = micro + plan.pp - 1
        busy_stages = (min(s + 1, plan.pp, micro, slots - s) for s in range(slots))
        return sum(max(1.0, threads_of_stage * n / cores) for n in busy_stages) / slots

    @cached_property
    def products_frac(self) -> float:
        """The share of forward's and backward's time that ``Work.product_us`` counts."""
        works = [work for x in self.layers for work in (x.forward_work, x.backward_work)]
        lane_us = sum(work.lane_us for work in works)
        return sum(work.product_us for work in works) / lane_us if lane_us else 0.0

    @cached_property
    def strategy(self) -> Strategy:
        """How data parallelism keeps the replicas of this rank equal: DDP, ZeRO..."""
        stack = stack_of_row(self.book.stack)
        return by_software(strategy_of(self.plan), self.plan, stack, self.gradient_dtype)

    @property
    def one_by_one(self) -> bool:
        """Whether old software updates whole parameters in a loop (``optimizer.one_by_one``)."""
        capture, is_old = self.model.graph.capture, stack_of_row(self.book.stack).one_by_one
        if not is_old or update_of(capture.optimizer) not in LOOPED or "graph" in capture.engine:
            return False
        loops = once_of(capture)("has lists", partial(has_lists, capture))
        return loops and self.book.gpu.kind != "cpu" and not self.strategy.share_update

    def scales_loss(self, optimizer: str) -> bool:
        """Whether the loss is scaled, so that small gradients in fp16 do not become zero.

        By a GradScaler under autocast; by software itself if it keeps fp32 copies of fp16 weights.
        """
        unfused = self.model.graph.unfused
        dtypes = {self.gradient_dtype, once_of(unfused)("half", partial(half_dtype, unfused))}
        scales = self.plan.amp or dtypes & stack_of_row(self.book.stack).held.keys()
        return bool(scales) and optimizer != "none" and "fp16" in dtypes

    def awaits_scale(self, optimizer: str) -> bool:
        """Whether the host waits for the scaler: torch's fused AdamW finds out on the GPU alone."""
        stack, fused = stack_of_row(self.book.stack), update_of(optimizer) == "adamw_fused"
        skips = fused and self.plan.amp and not stack.one_by_one
        return self.scales_loss(optimizer) and not skips

    @cached_property
    def gradient_dtype(self) -> str:
        """The dtype of the first parameter with a gradient."""
        trained = (p.dtype for x in self.layers for p in x.layer.trained)
        return next(trained, PRECISE)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a rank ran in a simulation: tasks, their spans, and ops added to the layers' own.

    ``blocking_us``: of compute tasks the part that waits for collectives. ``queued_us``: what the
    GPU still computes where a program's host takes batches, in all of a step.
    """

    tasks: tuple[Task, ...]
    spans: tuple[Span, ...]
    blocking_us: float = 0.0
    queued_us: float = 0.0
    sent: tuple[PricedOp, ...] = ()
    updates: tuple[PricedOp, ...] = ()
    copies: tuple[PricedOp, ...] = ()

    @property
    def end_us(self) -> float:
        """When the last task ends."""
        return max((s.end_us for s in self.spans), default=0.0)

    @property
    def added(self) -> tuple[PricedOp, ...]:
        """The ops that are not those of layers."""
        return (*self.sent, *self.copies, *self.updates)


class RankTasks:
    """The tasks of a rank's program as it is built, and the ops it adds to those of layers.

    ``pauses``: by the layer at which backward goes on, until when at least, and after how much work
    on other micro-batches.
    """

    def __init__(
        self, rank: Rank, *, ahead: bool = False, pauses: Mapping[int, Pause] = MappingProxyType({})
    ) -> None:
        self.rank, self.strategy, self.pauses = rank, rank.strategy, pauses
        self.lanes = Lanes(rank.book.gpu.kind == "cpu", rank.ranks_per_core, ahead)
        self.sent: list[PricedOp] = []
        self.copies: list[PricedOp] = []
        self.updates: list[PricedOp] = []
        self.filled: list[LayerBucket] = []
        self.copied: list[int] = []  # to the host
        self.averaged: list[int] = []  # messages of parameters that the optimizer waits for
        self.once = Once()  # what equal layers have in common

    def run(self) -> Run:
        """Simulate the program."""
        lanes = dict.fromkeys((*SHARED, AMONG_GROUPS), "rank")
        spans = simulate_shared(self.lanes.tasks, lanes, self.rank.book.contention)
        return Run(
            tasks=tuple(self.lanes.tasks),
            spans=tuple(spans),
            blocking_us=self.lanes.comm_us,
            sent=tuple(self.sent),
            updates=tuple(self.updates),
            copies=tuple(self.copies),
        )

    def host_copy(self, nbytes: float, lane: str) -> PricedOp:
        """A copy between GPU and host, on a lane of its own."""
        self.sent.append(host_copy(lane, nbytes, self.rank.book.gpu))
        return self.sent[-1]

    def to_host(self, x: PricedLayer) -> None:
        """Copy what a layer saves to the host, beside the next layer's forward.

        The copy before must be done then: saved tensors of two layers are on the GPU at a time.
        """
        if "activations" in self.strategy.offload:
            self.lanes.wait(self.copied[-1:])
            self.copied.append(self.lanes.send(self.host_copy(x.saved_bytes, "d2h"), "d2h"))

    def from_host(self, x: PricedLayer, after: tuple[int, ...]) -> None:
        """Copy what a layer saved back before its backward, once the tasks ``after`` are done."""
        if x.fetches and "activations" in self.strategy.offload:
            self.lanes.wait([self.lanes.send(self.host_copy(x.saved_bytes, "h2d"), "h2d", after)])

    def fetch(self, nbytes: int, after: tuple[int, ...]) -> tuple[int, ...]:
        """Copy a rank's shards that the host has to the GPU once the tasks ``after`` are done."""
        if "parameters" not in self.strategy.offload or not nbytes:
            return ()
        return (self.lanes.send(self.host_copy(nbytes, "h2d"), "h2d", after),)

    def keep(self, nbytes: int, after: tuple[int, ...], *, later: bool) -> list[int]:
        """If the optimizer is on the host, copy a rank's gradients there after these tasks.

        ``later``: the host then adds them to those of earlier micro-batches.
        """
        if "parameters" not in self.strategy.offload or not nbytes:
            return []
        self.copied.append(self.lanes.send(self.host_copy(nbytes, "d2h"), "d2h", after))
        if later:  # the sum reads both and writes one
            self.copies.append(on_host("sum of gradients", 3 * nbytes, self.rank.cluster))
            self.lanes.on_host(self.copies[-1], self.copied[-1:])
        return self.copied[-1:]

    def pause(self, i: int) -> None:
        """Let backward go on at layer ``i`` when the schedule does, if it pauses there."""
        if i in self.pauses:
            self.lanes.resume(*self.pauses[i], self.rank.products_frac)

    def price(self, messages: Sequence[Message], every: float = 1) -> list[PricedOp]:
        """Messages with durations, noted as sent; a step's mean of those sent every few steps."""
        rank = self.rank
        ops = [op.over(every) for op in price_messages(messages, rank.book, rank.cluster)]
        self.sent += ops
        return ops
