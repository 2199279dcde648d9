"""Host time of a step: Python and autograd events without a kernel, kernel launches, CPU work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import StepCapture
from itercast.compose.graph.launch_modes import launches
from itercast.compose.graph.layers import Layer
from itercast.compose.parallel.placement import Cluster
from itercast.compose.pricing.optimizer import STATE_COPIES
from itercast.compose.pricing.price_book import PriceBook, price_book
from itercast.compose.pricing.priced_op import AssumedShares, AssumedTime, PricedOp
from itercast.compose.pricing.work import Step
from itercast.learners.transfer.source_gpus import gpu_distance
from itercast.microbench.hardware.host import EVENT_US, LAUNCH_EVENT
from itercast.microbench.hardware.stack import has_dtensor
from itercast.microbench.ops.step.host import EVENTS, REPEATED, Host
from itercast.microbench.store import Facts

OF_DTENSOR = (
    "tp_product",
    "tp_product_bias",
    "tp_loss",
    "dtensor_update",
    *(f"{name}_dtensor_step" for name in STATE_COPIES),
)
WRAPPERS = (
    "fsdp_layer",
    "fsdp_layer_kept",
    "checkpoint_layer",
    "selective_op",
    "pipeline_micro",
    *OF_DTENSOR,
)
# Events that come once, over as many tensors as they are counted: parameters of an optimizer or of
# a layer, tensors that a checkpoint saves.
EVENTS_OVER_TENSORS = (
    *(f"{name}{step}" for name in STATE_COPIES for step in ("_step", "_dtensor_step")),
    "fsdp_layer",
    "fsdp_layer_kept",
    "checkpoint_layer",
)
MEMORY_BYTES_PER_S: Mapping[str, float] = assumed(__file__, "memory_bytes_per_s")
PYTHON = "python"  # phase of host work that no op stands for


def host_cost(counts: Mapping[str, int], book: PriceBook) -> PricedOp:
    """Prices all Python and autograd events of a step together: counts times event times.

    If the user named a host, its times price all events. Else the learned model of family "host"
    does: on a CPU for all events but those of parallel wrappers (DDP, FSDP) and of loops over
    tables; elsewhere only inside its training range. Remaining events take the times that are
    assumed of the book's host; on a CPU these are scaled by how much slower it was measured to be
    (``_slowdown``). The share of assumed times is in ``assumed``.
    """
    unknown = sorted(set(counts) - set(EVENT_US))
    if unknown:
        raise ValueError(f"unknown host events {unknown}; known: {sorted(EVENT_US)}")
    events = {name: n for name, n in counts.items() if n}
    tensors = {event: n if event in EVENTS_OVER_TENSORS else 1 for event, n in events.items()}
    points = [Host(op=event, tensors=n) for event, n in tensors.items()]
    measured = _book_of_host_times(book)
    rows = measured.points("host", points) if "host" in book.models else {}
    by_assumption = AssumedTime()
    for event, point in zip(events, points, strict=True):
        times = 1 if event in EVENTS_OVER_TENSORS else counts[event]
        row = rows[point][0] if rows else None
        one_us, shares = _event_us(event, point.tensors, row, book)
        by_assumption.add_us(times * one_us * book.machine.host, shares)
    return host_work(by_assumption)


def host_work(time: AssumedTime) -> PricedOp:
    """Host work of this total time as one op."""
    return PricedOp(
        op="host",
        family="host",
        phase=PYTHON,
        duration_us=time.total_us,
        assumed=time.shares,
    )


def _event_us(
    event: str, tensors: int, row: Facts | None, book: PriceBook
) -> tuple[float, AssumedShares]:
    """Time of one event in us, and the assumptions it rests on, if any.

    ``row``: the learned model's forecast, or None. It is used on a CPU, and inside its training
    range; else the time of the book's host is, which is assumed unless the user named that host.
    """
    if event in OF_DTENSOR and not has_dtensor(book.stack):
        return 0.0, ()
    on_this_cpu = book.gpu.kind == "cpu" and event not in (*WRAPPERS, REPEATED)
    if row is not None and not book.host_is_named and (on_this_cpu or row["in_envelope"]):
        return row["predicted_us"] / (LAUNCH_EVENT if event == "launch" else 1.0), ()
    is_known_host = book.host_is_named and event not in WRAPPERS
    shares = () if is_known_host else ((f"host.event_us.{event}", 1.0),)
    return _slowdown(book) * book.host.event_us(event, tensors), shares


def _slowdown(book: PriceBook) -> float:
    """How much slower a measured CPU runs host events than is assumed: measured over assumed.

    The median over events that every step has; 1 where none of them were measured.
    """
    if book.gpu.kind != "cpu" or book.host_is_named or book.models.get("host") is None:
        return 1.0

    def measured_over_assumed() -> float:
        events = [Host(op=event) for event in EVENTS]
        rows = book.points("host", events)
        return median(float(rows[p][0]["predicted_us"] / book.host.event_us(p.op)) for p in events)

    slowdown: float = book.once(("slowdown",), measured_over_assumed)
    return slowdown


def _book_of_host_times(book: PriceBook) -> PriceBook:
    """The book whose model prices host events: that of a GPU whose host was measured.

    It is ``book`` itself on a CPU, without a model of host times, or where a host with this GPU was
    measured. Else it is the book of the most similar GPU with a measured host: Python's time
    depends on the GPU only through the machine that it sits in.
    """
    model = book.models.get("host")
    if model is None or book.gpu.kind == "cpu":
        return book
    gpus = [model.source_gpus.gpus[name] for name in model.source_gpus.measured]
    gpus = [gpu for gpu in gpus if gpu.kind == book.gpu.kind]
    if not gpus or book.gpu.name in model.source_gpus.measured:
        return book
    nearest = min(gpus, key=lambda gpu: gpu_distance(book.gpu, gpu, "fp32"))
    return price_book(book.pricer, nearest, book.threads, book.stack, book.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Host time of each op of a step, in us: an equal share of all Python, and the op's launch.

    - ``python_us``: Python and autograd per op.
    - The launch: ``usual_us``, that of a pointwise op, times the op's ``call_launches``.
    - ``alone_us``: as ``usual_us``, for an op that C++ adds and no module calls; it has no Python.
    - ``by_op`` false: one CUDA graph launches all. ``python_us`` and ``usual_us`` are of the whole
      step, and come before one op (``PricedOp.leads``, see ``led_by_graph``).
    - ``python_assumed``, ``launch_assumed``: shares of ``python_us``, and of ``usual_us`` and
      ``alone_us``, that rest on assumptions.
    """

    python_us: float
    usual_us: float
    alone_us: float
    by_op: bool = True
    python_assumed: AssumedShares = ()
    launch_assumed: AssumedShares = ()

    def us(self, op: PricedOp, *, added: bool = False) -> float:
        """Host time of one op in us; ``added``: an op that C++ adds and no module calls."""
        if not self.by_op and not added:
            return op.leads * (self.python_us + self.usual_us)
        if added:
            return self.alone_us * self._calls(op)
        return self.python_us + self.usual_us * self._calls(op)

    def _calls(self, op: PricedOp) -> float:
        """Host time of its call over that of a pointwise op."""
        return op.call_launches if self.by_op else 1.0

    def total(self, ops: Sequence[PricedOp]) -> AssumedTime:
        """Adds up the host time of ops of the captured step, by assumption."""
        calls, launches = float(len(ops)), sum(map(self._calls, ops))
        if not self.by_op:
            calls = launches = sum(op.leads for op in ops)
        total = AssumedTime()
        total.add_us(self.python_us * calls, self.python_assumed)
        total.add_us(self.usual_us * launches, self.launch_assumed)
        return total

    def step(self, op: PricedOp, *, added: bool = False) -> Step:
        """An op with its launch time, to be simulated; Python events have no kernel."""
        if op.phase == PYTHON:
            return Step(0.0, op.duration_us, name=op.op)
        return Step(
            us=op.duration_us,
            launch_us=self.us(op, added=added),
            comm=op.phase == "comm",
            kernels=op.kernels if self.by_op else 1,
            name=op.op,
            waits=op.waits and self.by_op,
            phase=op.phase,
            nbytes=op.nbytes,
            product=op.product,
        )


def launch_costs(capture: StepCapture, events: Mapping[str, int], book: PriceBook) -> Launches:
    """Prices a step's host time per op: its launch, and an equal share of all Python events.

    If a CUDA graph launches the step, all of it comes before one op. ``events``: how often each
    kind of event (a module call, a view...) occurs. On a CPU the launch is part of the op's own
    time.
    """
    by_op = "graph" not in capture.engine
    calls = max(1, len(capture.calls)) if by_op else 1
    python = host_cost(events, book)
    python_us = python.duration_us / calls
    if book.gpu.kind == "cpu":
        return Launches(
            python_us=python_us, usual_us=0.0, alone_us=0.0, python_assumed=python.assumed
        )
    launch = host_cost({"launch": 1}, book)
    return Launches(
        python_us=python_us,
        usual_us=launch.duration_us * launches(capture) / calls,
        alone_us=launch.duration_us,
        by_op=by_op,
        python_assumed=python.assumed,
        launch_assumed=launch.assumed,
    )


def led_by_graph(
    layers: Sequence[Layer], ops: Mapping[int, PricedOp], costs: Launches
) -> tuple[Layer | None, dict[int, PricedOp]]:
    """Marks the op that waits for a CUDA graph's launch; returns its layer, and all ops.

    In inference it is the first op of forward; in training the last op of backward, as the host
    launches a step while the one before runs. No layer where ops are launched one by one.
    """
    led = dict(ops)
    last_of_backward = [(x, x.backward[1] - 1) for x in layers if x.backward[0] < x.backward[1]]
    first_of_forward = [(x, x.forward[0]) for x in layers if x.forward[0] < x.forward[1]]
    candidates = last_of_backward or first_of_forward
    if costs.by_op or not candidates:
        return None, led
    layer, number = candidates[0]
    led[number] = replace(led[number], leads=1.0)
    return layer, led


def python_op(event: str, count: int, book: PriceBook, share: float = 1.0) -> PricedOp:
    """Makes the Python of a parallel wrapper (DDP, FSDP) an op with host time and no compute.

    ``share`` of the event's time, where forward and backward have a part each.
    """

    def priced() -> PricedOp:
        cost = host_cost({event: count}, book)
        return replace(cost, op=event, duration_us=share * cost.duration_us)

    return book.once(("python", event, count, share), priced)


def host_bytes_per_s(cluster: Cluster) -> float:
    """Bytes that a rank's part of its host's cores read and write in a second.

    The ranks of a node share out its cores, and its memory's bandwidth, evenly. torchrun gives each
    one thread unless OMP_NUM_THREADS says otherwise: that is slower.
    """
    by_cores = cluster.cores_of_a_rank * MEMORY_BYTES_PER_S["core"]
    return min(by_cores, cluster.gpus_of_a_rank * MEMORY_BYTES_PER_S["gpu"])


def on_host(name: str, nbytes: float, cluster: Cluster) -> PricedOp:
    """An op that reads and writes ``nbytes`` of host memory."""
    return PricedOp(
        op=name,
        family="host",
        phase=PYTHON,
        duration_us=nbytes / host_bytes_per_s(cluster) * 1e6,
        assumed=(("host.memory_bytes_per_s", 1.0),),
        nbytes=nbytes,
    )
