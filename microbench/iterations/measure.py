"""Measures training iterations: warm-up, repeated steps, times by phase, speed of the machine."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from itercast.capture.base.extensions import function_of
from itercast.capture.base.slow_imports import torch
from itercast.capture.cases.registry import EvalCase
from itercast.capture.step import BACK_TO_BACK, SYNCHRONISED, TIMINGS, StepSettings, make_step
from itercast.microbench.iterations.engines import ENGINES, captured_in_graph, on_device
from itercast.microbench.iterations.measured_plan import PlanStep, measurable_plan
from itercast.microbench.processes.ranks import max_over_ranks, rank0_value
from itercast.microbench.store import Row
from itercast.microbench.sweep.rows import failure
from itercast.microbench.timing.clock import summarise
from itercast.microbench.timing.gpu_watch import GpuWatch

WARMUP = 3
REPETITIONS = 20
TIME_S = 0.4  # of all repetitions, at least
GPU_TIME_S = (1.0, 6.0)  # the same on a GPU, whose clocks settle meanwhile, and at most
MIN_REPETITIONS = 8  # on a GPU, however long: for p20 and p80
ANCHOR_EVERY_US = 2.5e5  # of steps between two times of the anchor
FEW = 12  # no assumption: steps in that time; of so long ones what ran before is a small part
PHASES = ("zero_grad", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One training step to measure: a case, its settings and its plan; ``batch`` is per replica.

    ``engine``: eager, graph (the whole step in one CUDA graph), compile (torch.compile), or
    compile+graph (the compiled step in one CUDA graph). ``timing``: synchronised (the host waits
    for the device at the end of each step), or on a GPU back_to_back (it waits after the last one,
    as a training loop does that reads no result).
    """

    case: str
    batch: int
    seq: int = 0
    plan: str = ""
    mode: str = "train"
    loss: str = "default"
    optimizer: str = "adamw"
    dtype: str = "fp32"
    attn: str = "sdpa"
    engine: str = "eager"
    timing: str = SYNCHRONISED

    def __post_init__(self) -> None:
        for name, allowed in (("engine", ENGINES), ("timing", TIMINGS)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} {value!r}: allowed are {', '.join(allowed)}")

    @property
    def ranks(self) -> int:
        """Number of processes; ValueError for a plan that cannot be measured."""
        return measurable_plan(self.plan).world_size

    def settings(self) -> StepSettings:
        """The settings of the step."""
        return StepSettings(
            mode=self.mode,
            optimizer=self.optimizer,
            loss=self.loss,
            dtype=self.dtype,
            attn=self.attn,
        )


def measure_iteration(
    case: EvalCase,
    iteration: Iteration,
    device: str,
    *,
    repetitions: int = REPETITIONS,
    anchor: Callable[[], dict[str, float]] | None = None,
    watch: GpuWatch | None = None,
) -> Row:
    """Measure an iteration once and return the measured columns of its row.

    Runs at least ``repetitions`` steps, for at least 0.4 s (1 s on a GPU); see ``BuiltIteration``.
    """
    built = BuiltIteration(case, iteration, device, anchor=anchor, watch=watch)
    try:
        return built.measure(repetitions, GPU_TIME_S[0] if device == "cuda" else TIME_S)
    finally:
        built.close()


class BuiltIteration:
    """An iteration whose model is built, to be measured once, or several times among others.

    With several ranks each of them does the same; a barrier precedes each step, and times are those
    of the slowest rank.

    - ``anchor()`` times fixed reference workloads, by column in us; it is called before the first
      step, after steps of a quarter of a second and at the end, and the geometric means become
      columns. Short steps run once untimed after it, so that caches hold what a step leaves.
    - ``watch`` reads the GPU's clocks and power during further, untimed steps.

    A failure on a GPU becomes status and reason of the rows; on a CPU only lack of memory does.
    """

    def __init__(
        self,
        case: EvalCase,
        iteration: Iteration,
        device: str,
        *,
        anchor: Callable[[], dict[str, float]] | None = None,
        watch: GpuWatch | None = None,
    ) -> None:
        self.iteration, self.device = iteration, device
        self.failed: Row = {}
        self._timer: _StepTimer | None = None
        self._attempt(lambda: self._build(case, anchor, watch))

    def measure(self, repetitions: int, least_s: float) -> Row:
        """Repeat the step at least this often and this long; returns the measured columns.

        ``<phase>_us``: median by phase; on a GPU this is host time.
        """
        timer = self._timer
        if timer is None:
            return self.failed
        return self._attempt(lambda: {"status": "ok", **timer.repeat(repetitions, least_s)})

    def close(self) -> None:
        """Let go of the model."""
        self._timer = None
        gc.enable()

    def _build(
        self, case: EvalCase, anchor: Callable[[], dict[str, float]] | None, watch: GpuWatch | None
    ) -> Row:
        """Build the step and the timer that repeats it."""
        self._timer = _prepare(case, self.iteration, self.device, anchor, watch)
        return {}

    def _attempt(self, act: Callable[[], Row]) -> Row:
        """What ``act`` returns, or the columns of its failure, kept so that nothing runs again."""
        from itercast.capture.recorder.attention import attention_as  # needs torch

        try:
            with attention_as(self.iteration.attn):
                return act()
        except Exception as exc:  # any failure on a GPU becomes a row
            self.failed, self._timer = failure(exc), None
            if self.device == "cpu" and self.failed["status"] != "oom":
                exc.add_note(f"measuring {self.iteration.case} {self.iteration.plan}")
                raise
            return self.failed


def _prepare(
    case: EvalCase,
    iteration: Iteration,
    device: str,
    anchor: Callable[[], dict[str, float]] | None,
    watch: GpuWatch | None,
) -> _StepTimer:
    """Build the step and the timer that repeats it."""
    marks: list[tuple[str, int]] = []

    def on_phase(phase: str) -> None:
        marks.append((phase, time.perf_counter_ns()))

    if iteration.plan:
        sizes, settings = (iteration.batch, iteration.seq), iteration.settings()
        make_plan_step = function_of("plan_steps", "torch")
        step: PlanStep = make_plan_step(case, iteration.plan, *sizes, settings, device, on_phase)
    else:
        step = PlanStep(run=_one_process(case, iteration, device, on_phase))
    if iteration.timing == BACK_TO_BACK:
        if device != "cuda" or iteration.plan:
            raise NotImplementedError("steps are timed back to back on one GPU only")
        return _StepTimer(step, marks, device, False, anchor, watch, one_by_one=False)
    return _StepTimer(step, marks, device, iteration.ranks > 1, anchor, watch)


def prepared_step(case: EvalCase, iteration: Iteration, device: str) -> Callable[[], None]:
    """The step of one process as a function to run; ValueError for a plan."""
    if iteration.plan:
        raise ValueError(f"plan {iteration.plan!r}: steps of one process are profiled only")
    return _one_process(case, iteration, device, lambda phase: None)


def _one_process(
    case: EvalCase, iteration: Iteration, device: str, on_phase: Callable[[str], None]
) -> Callable[[], None]:
    """The step of one process, run by the iteration's engine."""
    with on_device(device, iteration.dtype):
        model: Any = case.build()
        inputs = case.inputs(iteration.batch, iteration.seq)
    loss = case.loss
    if "compile" in iteration.engine:
        model, loss = torch.compile(model), torch.compile(loss)
    graph = "graph" in iteration.engine
    step = make_step(model, inputs, loss, iteration.settings(), on_phase, capturable=graph)
    return captured_in_graph(step, device, WARMUP) if graph else step


class _StepTimer:
    """Repeats a step and keeps the times of its phases.

    ``anchor`` times reference workloads, which tell the machine's speed. ``one_by_one``: the host
    waits for the device at the end of each step.
    """

    def __init__(
        self,
        step: PlanStep,
        marks: list[tuple[str, int]],
        device: str,
        together: bool,
        anchor: Callable[[], dict[str, float]] | None,
        watch: GpuWatch | None,
        one_by_one: bool = True,
    ) -> None:
        self.step, self.device = step, device
        self.marks = marks  # (phase, ns), which the step adds when a phase begins
        self.together = together  # whether other ranks run the step, too
        self.anchor, self.watch = anchor, watch
        self.one_by_one = one_by_one
        self.phases: dict[str, list[float]] = {}
        self.anchors: list[dict[str, float]] = []
        self.every = 1  # steps between two timings of the anchor
        self.least_us = math.inf  # of the steps before those that are timed

    def repeat(self, repetitions: int, least_s: float) -> Row:
        """Time repeated steps, after WARMUP untimed ones at first; returns the measured columns."""
        first_time = math.isinf(self.least_us)
        for _ in range(WARMUP if first_time else 0):
            self.once()
        if first_time:
            gc.collect()
        gc.disable()
        self.least_us = min(self.least_us, self.once())
        count = self._count(repetitions, least_s)
        self.phases.clear()
        self.anchors.clear()
        times, conditions = self._times(count)
        self.step.finish()
        timing = summarise(max_over_ranks(times) if self.together else times)
        return {
            **conditions,
            **asdict(timing),
            **{f"{p}_us": summarise(self.phases[p]).time_us for p in PHASES if p in self.phases},
            **self.anchor_us(),
            **self._memory(),
        }

    def _times(self, count: int) -> tuple[list[float], Row]:
        """Times of ``count`` steps, and columns with the GPU's clocks and power meanwhile."""
        if not self.one_by_one:
            return self._back_to_back(count)
        if self.watch is None:
            self._time_anchor(again=True)
            return [self._with_speed(n, count) for n in range(1, count + 1)], {}
        self.watch.begin()
        times = list[float]()
        for _ in range(count):
            if not self.together and self.watch.due():
                self._watched()
            times.append(self._with_speed(len(times) + 1, count))
        if self.together:  # all ranks must run the same number of steps
            self.watch.read()
        return times, self.watch.facts()

    def _back_to_back(self, count: int) -> tuple[list[float], Row]:
        """Times between the ends of ``count`` steps that the host launches without waiting.

        The GPU is read once, when all are launched and it still runs the last ones.
        """
        if self.watch is not None:
            self.watch.begin()
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for end in ends:
            self.step.run()
            end.record()
        if self.watch is not None:
            self.watch.read()
        torch.cuda.synchronize()
        times = [1e3 * end.elapsed_time(next_end) for end, next_end in itertools.pairwise(ends)]
        return times, self.watch.facts() if self.watch is not None else {}

    def _watched(self) -> None:
        """Read the GPU during a step that is not timed; a reading takes a millisecond or more."""
        self.step.run()
        if self.watch is not None:
            self.watch.read()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _count(self, repetitions: int, least_s: float) -> int:
        """How often the step is timed, the same on all ranks."""
        count = max(repetitions, math.ceil(least_s * 1e6 / self.least_us))
        self.every = self._agreed(math.ceil(ANCHOR_EVERY_US / self.least_us))
        if self.device == "cuda":
            count = min(count, max(MIN_REPETITIONS, math.ceil(GPU_TIME_S[1] * 1e6 / self.least_us)))
        return self._agreed(count)

    def _agreed(self, count: int) -> int:
        """Rank 0's number, on all ranks."""
        return rank0_value(count) if self.together else count

    def _with_speed(self, number: int, count: int) -> float:
        """Time of step ``number`` of ``count``; after every few steps the anchor is timed, too."""
        step_us = self.once()
        if number % self.every == 0 or number == count:
            self._time_anchor(again=number < count and self.every > FEW)
        return step_us

    def _time_anchor(self, again: bool) -> None:
        """Time the anchor, where there is one, and run a step ``again`` that is not timed."""
        if self.anchor is None:
            return
        if self.together and self.step.barrier:
            torch.distributed.barrier()  # ranks time their anchors together, as in a sweep
        self.anchors.append(self.anchor())
        for _ in range(self.step.steps if again else 0):
            self.step.run()

    def _memory(self) -> dict[str, int]:
        """Peak memory of the step, on a GPU."""
        if self.device != "cuda":
            return {}
        return {"peak_memory_bytes": int(torch.cuda.max_memory_allocated())}

    def once(self) -> float:
        """Run one step; returns its time in us and keeps the times of its phases."""
        self.marks.clear()
        if self.together and self.step.barrier:
            torch.distributed.barrier()
        start = time.perf_counter_ns()
        for _ in range(self.step.steps):
            self.step.run()
        if self.device == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter_ns()
        ends = [begin for _, begin in self.marks[1:]] + [end]
        for (phase, begin), phase_end in zip(
            self.marks, ends, strict=False
        ):  # a graph has no phases
            self.phases.setdefault(phase, []).append((phase_end - begin) / 1e3)
        return (end - start) / 1e3 / self.step.steps

    def anchor_us(self) -> dict[str, float]:
        """Geometric means of the anchor's times, on the slowest rank."""
        if not self.anchors:
            return {}
        logs = [[math.log(times[name]) for times in self.anchors] for name in self.anchors[0]]
        means = [math.exp(sum(values) / len(values)) for values in logs]
        means = max_over_ranks(means) if self.together else means
        return dict(zip(self.anchors[0], means, strict=True))
