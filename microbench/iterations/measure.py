"""Measured iterations of a case: warm-up, repetitions, times by phase, the machine's speed."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from microbench.cases.registry import EvalCase
from microbench.iterations.engines import ENGINES, graphed, placed
from microbench.iterations.measured_plan import MeasuredPlan, PlanStep
from microbench.iterations.plan_steps import make_plan_step
from microbench.processes.ranks import agree, slowest
from microbench.step import StepSettings, make_step
from microbench.sweep.gpu_chunks import failure_status
from microbench.timing.clock import summarise
from microbench.timing.gpu_watch import GpuWatch

WARMUP = 3
REPETITIONS = 20
MIN_TIME_S = 0.4
GPU_TIME_S = (1.0, 6.0)  # of repetitions: until clocks have settled, and at most
LEAST_REPETITIONS = 8  # on a GPU, however long: a p20 and a p80 need some
PHASES = ("zero_grad", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What is measured: one step of a case under a plan; ``batch`` is per replica.

    ``engine``: eager, graph (all of the step in one CUDA graph) or compile (torch.compile).
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

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine {self.engine!r}: allowed are {', '.join(ENGINES)}")

    @property
    def ranks(self) -> int:
        """Processes it takes; ValueError for a plan that cannot be run here yet."""
        return MeasuredPlan.parse(self.plan).ranks

    def settings(self) -> StepSettings:
        """The step's settings."""
        return StepSettings(
            mode=self.mode,
            optimizer=self.optimizer,
            loss=self.loss,
            dtype=self.dtype,
            attn=self.attn,
        )


def measure(
    case: EvalCase,
    asked: Iteration,
    device: str,
    *,
    repetitions: int = REPETITIONS,
    anchor: Callable[[], dict[str, float]] | None = None,
    watch: GpuWatch | None = None,
) -> dict[str, Any]:
    """One row of family ``iteration``: at least ``repetitions`` steps and 0.4 s, 1 s on a GPU.

    Under a plan every rank calls this: a barrier stands before each step, and the slowest rank
    counts. ``anchor`` is timed after each step; the row has geometric means of its times. ``watch``
    looks at the GPU during steps of which the time does not count.
    ``<phase>_us`` are medians by phase; on a GPU they are the host's times, not the device's.
    A step that fails on a GPU is a row; on a CPU only one that needs too much memory is.
    """
    from microbench.capture.attention import attention_as  # needs torch

    row: dict[str, Any] = {"op": "train_step", **asdict(asked), "reason": ""}
    try:
        with attention_as(asked.attn):
            timed = _prepare(case, asked, device, anchor, watch)
            return {**row, "status": "ok", **timed.repeat(repetitions)}
    except Exception as exc:  # on a GPU whatever it is becomes a row
        status = failure_status(exc)
        if device == "cpu" and status != "oom":
            raise
        return {**row, "status": status, "reason": " ".join(str(exc).split())[:200]}
    finally:
        gc.enable()


def _prepare(
    case: EvalCase,
    asked: Iteration,
    device: str,
    anchor: Callable[[], dict[str, float]] | None,
    watch: GpuWatch | None,
) -> _Timed:
    """The step, warmed up."""
    marks: list[tuple[str, int]] = []

    def on_phase(phase: str) -> None:
        marks.append((phase, time.perf_counter_ns()))

    if asked.plan:
        size = (asked.batch, asked.seq)
        step = make_plan_step(case, asked.plan, *size, asked.settings(), device, on_phase)
    else:
        step = PlanStep(run=_one_process(case, asked, device, on_phase))
    return _Timed(step, marks, device, asked.ranks > 1, anchor, watch)


def _one_process(
    case: EvalCase, asked: Iteration, device: str, on_phase: Callable[[str], None]
) -> Callable[[], None]:
    """The step of one process under its engine."""
    import torch  # lazy: cases are listed without torch

    with placed(device, asked.dtype):
        model: Any = case.build()
        inputs = case.inputs(asked.batch, asked.seq)
    loss = case.loss
    if asked.engine == "compile":
        model, loss = torch.compile(model), torch.compile(loss)
    graph = asked.engine == "graph"
    step = make_step(model, inputs, loss, asked.settings(), on_phase, capturable=graph)
    return graphed(step, device, WARMUP) if graph else step


class _Timed:
    """Repeats a step and keeps its times."""

    def __init__(
        self,
        step: PlanStep,
        marks: list[tuple[str, int]],
        device: str,
        together: bool,
        anchor: Callable[[], dict[str, float]] | None,
        watch: GpuWatch | None,
    ) -> None:
        self.step, self.marks, self.device = step, marks, device
        self.together, self.anchor, self.watch = together, anchor, watch
        self.phases: dict[str, list[float]] = {}
        self.anchors: list[dict[str, float]] = []

    def repeat(self, repetitions: int) -> dict[str, Any]:
        """Columns of the row."""
        for _ in range(WARMUP):
            self.once()
        gc.collect()
        gc.disable()
        count = self._count(repetitions, self.once())
        self.phases.clear()
        self.anchors.clear()
        times, conditions = self._times(count)
        self.step.finish()
        timing = summarise(slowest(times) if self.together else times)
        return {
            **conditions,
            **asdict(timing),
            **{f"{p}_us": summarise(self.phases[p]).time_us for p in PHASES if p in self.phases},
            **self.anchor_us(),
            **self._memory(),
        }

    def _times(self, count: int) -> tuple[list[float], dict[str, Any]]:
        """Times of so many steps, and what was seen of the GPU meanwhile."""
        if self.watch is None:
            return [self.once() for _ in range(count)], {}
        self.watch.begin()
        times = []
        for _ in range(count):
            if not self.together and self.watch.due():
                self._watched()
            times.append(self.once())
        if self.together:  # ranks must all make the same steps
            self.watch.look()
        return times, self.watch.facts()

    def _watched(self) -> None:
        """A step that is not timed: a reading takes a millisecond or more of it."""
        import torch  # lazy, as above

        self.step.run()
        if self.watch is not None:
            self.watch.look()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _count(self, repetitions: int, first_us: float) -> int:
        """How often the step is timed, alike on all ranks."""
        on_gpu = self.device == "cuda"
        least_s, most_s = GPU_TIME_S if on_gpu else (MIN_TIME_S, math.inf)
        count = max(repetitions, math.ceil(least_s * 1e6 / first_us))
        if on_gpu:
            count = min(count, max(LEAST_REPETITIONS, math.ceil(most_s * 1e6 / first_us)))
        return agree(count) if self.together else count

    def _memory(self) -> dict[str, int]:
        """What the step took at most, on a GPU."""
        import torch  # lazy, as above

        if self.device != "cuda":
            return {}
        return {"peak_memory_bytes": int(torch.cuda.max_memory_allocated())}

    def once(self) -> float:
        """One step in us; notes phases and the anchor."""
        import torch  # lazy, as above

        self.marks.clear()
        if self.together and self.step.barrier:
            torch.distributed.barrier()
        start = time.perf_counter_ns()
        self.step.run()
        if self.device == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter_ns()
        ends = [at for _, at in self.marks[1:]] + [end]
        for (phase, at), until in zip(self.marks, ends, strict=False):  # a graph tells no phases
            self.phases.setdefault(phase, []).append((until - at) / 1e3)
        if self.anchor is not None:
            if self.together and self.step.barrier:
                torch.distributed.barrier()  # ranks time their anchors at once, as in a sweep
            self.anchors.append(self.anchor())
        return (end - start) / 1e3

    def anchor_us(self) -> dict[str, float]:
        """Geometric means of the anchor's times; of several ranks the slowest."""
        if not self.anchors:
            return {}
        logs = [[math.log(one[name]) for one in self.anchors] for name in self.anchors[0]]
        means = [math.exp(sum(values) / len(values)) for values in logs]
        means = slowest(means) if self.together else means
        return dict(zip(self.anchors[0], means, strict=True))
