"""An iteration that is fed by a DataLoader: the simulated loop of a host, its workers and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import exp, log
from statistics import NormalDist, quantiles

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.durations import counted
from itercast.capture.input.lane import InputLane
from itercast.compose.forecast import Forecast
from itercast.compose.parallel.placement import host_cores
from itercast.compose.simulate.rank import host_copy_us
from itercast.compose.simulate.timeline import Task, simulate
from itercast.compose.target import Target
from itercast.microbench.hardware.node import USUAL_GPUS_PER_NODE, Node

BATCHES = 240  # that are simulated, or three by each worker if those are more; the last two
# thirds are counted, as many by each worker
AHEAD = 2  # batches that a host takes before the GPU is done with the first of them
MAX_WORKERS = 64  # tried for the fewest
MOST_WORKERS = 1024  # simulated
LATE: float = assumed(__file__, "late")
ALIKE: float = assumed(__file__, "alike")
HALF_WIDTH: float = assumed(__file__, "half_width")  # of what a loader takes for a batch
MOVED_HALF_WIDTH: float = assumed(__file__, "moved_half_width")  # the same, measured on another CPU
IMAGES_PER_S: dict[str, float] = assumed(__file__, "images_per_s")  # of a core, by its model
TRIED = 5  # times of a step and of its loader for their interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """The step that takes the batches.

    ``device_us``: a step on the GPU, 0 where there is none. ``copy_us``: its batches' copies to the
    GPU beside the step before; copies in the step's own stream are part of ``device_us``.
    ``host_us``: time for which the training process is busy or waits in a step. ``cores``: cores
    that it keeps busy meanwhile. ``batches``: how many batches a step takes.
    """

    device_us: float = 0.0
    copy_us: float = 0.0
    host_us: float = 0.0
    cores: float = 1.0
    batches: float = 1.0

    @property
    def alone_us(self) -> float:
        """An iteration whose batches are always there."""
        return max(self.device_us, self.host_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """An iteration that takes its batches from a loader with ``workers``.

    ``stage`` is the slowest: step, workers, loading (in the training process), receiving, copying
    or cores.
    ``burst``: iterations at the step's own pace before full queues are empty; 0 if never.
    """

    workers: int
    iteration_us: float
    alone_us: float
    stage: str
    burst: float = 0.0
    cores_used: float = 0.0

    @property
    def input_bound(self) -> bool:
        """Whether the iteration is ``LATE`` times as long as its step alone, or longer."""
        return self.iteration_us > LATE * self.alone_us


def fed(lane: InputLane, step: Consumer, workers: int, cores: float) -> Fed:
    """Simulate a loop over the loader with ``workers`` workers, on ``cores`` cores of the host."""
    if workers > MOST_WORKERS:
        raise ValueError(f"workers {workers}; allowed are 0 to {MOST_WORKERS}")
    if workers and not lane.worker.wall_us:
        raise ValueError(f"loader {lane.loader!r} was measured without workers only")
    if not workers and not lane.alone.wall_us:
        raise ValueError(f"loader {lane.loader!r} was measured with workers only")
    batches = lane.worker if workers else lane.alone
    host_us, device_us = step.host_us / step.batches, step.device_us / step.batches
    copy_us = step.copy_us / step.batches
    receive_us = lane.receive_us if workers else batches.mean_us
    crowd = crowding(lane, workers, cores)
    cpu_us = crowd * batches.mean_cpu_us + step.cores * host_us + (receive_us if workers else 0.0)
    worker_us = (batches.mean_us + (crowd - 1) * batches.mean_cpu_us) / max(1, workers)
    bounds = {"step": step.alone_us / step.batches, "cores": cpu_us / cores}
    bounds |= {"copying": copy_us} | ({"workers": worker_us} if workers else {})
    bounds["receiving" if workers else "loading"] = host_us + receive_us
    shortage = max(1.0, bounds["cores"] / worker_us) if workers and worker_us else 1.0
    times = batches.wall_us
    if workers:  # these crowd, and cores may be short
        pairs = zip(batches.wall_us, batches.cpu_us, strict=True)
        times = tuple(shortage * (wall + (crowd - 1) * cpu) for wall, cpu in pairs)
    us = step.batches * _period_us(
        times, workers, workers * lane.prefetch, receive_us, host_us, (copy_us, device_us)
    )
    rate = step.alone_us / us if us else 1.0
    late = us > LATE * step.alone_us and workers
    return Fed(
        workers=workers,
        iteration_us=us,
        alone_us=step.alone_us,
        stage=max(bounds, key=lambda name: bounds[name]),
        burst=workers * lane.prefetch / step.batches / (1 - rate) if late else 0.0,
        cores_used=min(cores, step.batches * cpu_us / us) if us else 0.0,
    )


def crowding(lane: InputLane, workers: int, cores: float) -> float:
    """CPU time of a batch with this many workers over that with one, interpolated."""
    if lane.crowd < 2 or workers < 2:
        return 1.0
    share = (min(workers, cores) - 1) / (lane.crowd - 1)
    return 1.0 + (lane.crowding - 1.0) * min(1.0, max(0.0, share))


def _period_us(
    times: Iterable[float],
    workers: int,
    queue: int,
    receive_us: float,
    host_us: float,
    device_us: tuple[float, float],
) -> float:
    """Mean time from batch to batch in us of the simulated loop, in steady state.

    Worker k % workers loads batch k once batch k - queue was taken. Without workers the host loads
    it. The GPU works on a batch while the host launches for it and takes the next. ``device_us``:
    the copy of a batch, which runs beside the step before, and the step.
    """
    tasks: list[Task] = []
    taken: list[int] = []
    done: list[int] = []
    batches = max(BATCHES, 3 * workers)
    for k, load_us in enumerate(islice(cycle(times), batches)):
        waits_for = (done[k - AHEAD],) if k >= AHEAD and any(device_us) else ()
        if workers:
            free = (taken[k - queue],) if k >= queue else ()
            tasks.append(Task((f"worker {k % workers}",), load_us, free, "load"))
            waits_for = (*waits_for, len(tasks) - 1)
        tasks.append(Task(("host",), receive_us if workers else load_us, waits_for, "take"))
        taken.append(len(tasks) - 1)
        tasks.append(Task(("host",), host_us, (), "launch"))
        after = taken[-1]
        for lane, us in zip(("copies", "gpu"), device_us, strict=True):
            if us:
                tasks.append(Task((lane,), us, (after,), lane))
                after = len(tasks) - 1
        done.append(len(tasks) - 1)
    spans, per_worker = simulate(tasks), max(1, workers)
    counted = batches * 2 // 3 // per_worker * per_worker
    return (spans[done[-1]].end_us - spans[done[-1 - counted]].end_us) / counted


def fewest_workers(lane: InputLane, step: Consumer, cores: float) -> Fed:
    """The fewest workers with which batches are not late; else those with the shortest iteration.

    Of numbers with about equal iterations (``ALIKE``) the smallest is taken.
    """
    tried = []
    for workers in range(MAX_WORKERS + 1):
        if not (lane.worker if workers else lane.alone).wall_us:
            continue
        tried.append(fed(lane, step, workers, cores))
        if not tried[-1].input_bound or (workers and tried[-1].stage != "workers"):
            break
    best_us = min(candidate.iteration_us for candidate in tried)
    return next(candidate for candidate in tried if candidate.iteration_us <= ALIKE * best_us)


def cores_of_a_rank(lane: InputLane, target: Target, world_size: int, cores: int = 0) -> float:
    """A rank's share of its host's cores: ``cores``, else those that the node's file states.

    Ranks on a CPU share the cores of the machine on which the loader was measured. Where nothing is
    stated, every GPU has the usual number.
    """
    if target.gpu.kind == "cpu":
        return (cores or lane.cores) / world_size
    gpus_per_node = target.node.gpus_per_node if target.node else USUAL_GPUS_PER_NODE
    return cores / min(world_size, gpus_per_node) if cores else host_cores(target.node, world_size)


def on_host(lane: InputLane, node: Node | None) -> InputLane:
    """The lane as the node's CPU makes its batches; as it is where either's rate is not known."""
    measured_rate, host_rate = (
        next((rate for model, rate in IMAGES_PER_S.items() if model in cpu), 0.0)
        for cpu in (lane.cpu, node.host if node else "")
    )
    return lane.slower(measured_rate / host_rate) if measured_rate and host_rate else lane


def consumer(forecast: Forecast, lane: InputLane, target: Target, samples: int) -> Consumer:
    """A forecast step as what takes batches from a lane, by PCIe to a GPU.

    On a CPU all of the step is the host's work. ``samples``: that a rank takes in a step.
    """
    if target.gpu.kind == "cpu":
        return Consumer(
            host_us=forecast.iteration_us,
            cores=max(1, target.gpu.sm_count // forecast.world_size),
            batches=max(1.0, samples / lane.batch_samples),
        )
    batches = max(1.0, samples / lane.batch_samples)
    copy_us = batches * host_copy_us(lane.batch_bytes, target.gpu)
    ahead_us, in_step_us = (copy_us, 0.0) if lane.copied_ahead else (0.0, copy_us)
    return Consumer(
        device_us=forecast.iteration_us + in_step_us,
        copy_us=ahead_us,
        host_us=max(forecast.host_us, forecast.host_held_us),
        batches=batches,
    )


def advice(forecast: Forecast, lane: InputLane, target: Target, samples: int) -> str:
    """How many workers a loader has, and how many are enough for the step.

    Batches were timed on this machine; if the node's host differs, the text says what they take
    there.
    """
    own, here_us = counted(lane.workers, "worker"), lane.worker.mean_us
    if not lane.workers:
        return own
    lane = on_host(lane, target.node)
    if here_us != lane.worker.mean_us:
        own += f", {lane.worker.mean_us / here_us:.2g} times as slow on its host as on this machine"
    cores = cores_of_a_rank(lane, target, forecast.world_size)
    best = fewest_workers(lane, consumer(forecast, lane, target, samples), cores)
    if best.input_bound:
        return f"{own}; more are no faster on {cores:.0f} cores a rank: limited by {best.stage}"
    return f"{own}; {best.workers} would be enough on the {cores:.0f} cores of a rank"


def with_input(forecast: Forecast, lane: InputLane, target: Target, samples: int) -> Forecast:
    """The forecast of the same step where its batches come from a loader with its own workers.

    Time that the step waits for them is idle time, ``input``; the copy of a batch is part of it.
    The interval is that of the step and of the loader, whose errors are independent.
    """
    own, lane = lane, on_host(lane, target.node)
    cores = cores_of_a_rank(lane, target, forecast.world_size)

    def iteration_us(step_slower: float, loader_slower: float) -> float:
        """The iteration in us if its step and its loader take so many times as long as forecast."""
        held_us = forecast.host_held_us * step_slower
        slower = replace(
            forecast, iteration_us=forecast.iteration_us * step_slower, host_held_us=held_us
        )
        step = consumer(slower, lane, target, samples)
        us = fed(lane.slower(loader_slower), step, lane.workers, cores).iteration_us
        return max(us, slower.iteration_us)

    wide = log(forecast.iteration_us_p90 / forecast.iteration_us)
    low_us, high_us = _interval(iteration_us, wide, HALF_WIDTH if lane == own else MOVED_HALF_WIDTH)
    late_us = iteration_us(1.0, 1.0) - forecast.iteration_us
    part = forecast.iteration_us / (forecast.iteration_us + late_us) if late_us else 1.0
    return replace(
        forecast,
        iteration_us=forecast.iteration_us + late_us,
        iteration_us_p10=low_us,
        iteration_us_p90=high_us,
        idle_us=forecast.idle_us + late_us,
        idle_by_us={**forecast.idle_by_us, "input": late_us},
        parts_frac={name: part * share for name, share in forecast.parts_frac.items()},
        **{
            name: part * getattr(forecast, name)
            for name in ("samples_per_s", "tokens_per_s", "mfu_frac", "assumed_frac")
        },
    )


def _interval(
    iteration_us: Callable[[float, float], float], wide: float, loader_wide: float
) -> tuple[float, float]:
    """The 80 % interval of an iteration whose step and loader err independently.

    Each takes ``TRIED`` equally likely times, the first and last of which end its own 80 %
    interval; all pairs are equally likely. ``wide``, ``loader_wide``: half widths of their
    intervals, in log time.
    """
    deviations = [NormalDist().inv_cdf((i + 1 / 2) / TRIED) for i in range(TRIED)]
    step, loader = (
        [exp(width * z / deviations[-1]) for z in deviations] for width in (wide, loader_wide)
    )
    cuts = quantiles(
        [iteration_us(by_step, by_loader) for by_step in step for by_loader in loader],
        n=10,
    )
    return cuts[0], cuts[-1]
