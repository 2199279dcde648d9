"""Measured iterations of a case: warm-up, repetitions, times by phase, the machine's speed."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from microbench.cases.registry import EvalCase
from microbench.plan_steps import MeasuredPlan, PlanStep, make_plan_step
from microbench.ranks import agree, slowest
from microbench.step import StepSettings, make_step
from microbench.timing import summarise

WARMUP = 3
REPETITIONS = 20
MIN_TIME_S = 0.4
PHASES = ("zero_grad", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What is measured: one step of a case under a plan; ``batch`` is per replica."""

    case: str
    batch: int
    seq: int = 0
    plan: str = ""
    mode: str = "train"
    loss: str = "default"
    optimizer: str = "adamw"
    dtype: str = "fp32"
    attn: str = "sdpa"

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
    anchor: Callable[[], float] | None = None,
) -> dict[str, Any]:
    """One row of family ``iteration``: at least ``repetitions`` steps and 0.4 s.

    Under a plan every rank calls this: a barrier stands before each step, and the slowest rank
    counts. ``anchor`` is timed after each step; ``anchor_us`` is its geometric mean. ``<phase>_us``
    are medians by phase; on a GPU they are the host's times, not the device's.
    """
    import torch  # lazy: cases are listed without torch

    row: dict[str, Any] = {"op": "train_step", **asdict(asked), "reason": ""}
    marks: list[tuple[str, int]] = []
    try:
        step = _step_of(
            case, asked, device, lambda phase: marks.append((phase, time.perf_counter_ns()))
        )
        timed = _Timed(step, marks, device, asked.ranks > 1, anchor)
        return {**row, "status": "ok", **timed.repeat(repetitions)}
    except (torch.cuda.OutOfMemoryError, MemoryError) as exc:
        return {**row, "status": "oom", "reason": str(exc)[:200]}
    finally:
        gc.enable()


def _step_of(
    case: EvalCase, asked: Iteration, device: str, on_phase: Callable[[str], None]
) -> PlanStep:
    settings = asked.settings()
    if asked.plan:
        size = (asked.batch, asked.seq)
        return make_plan_step(case, asked.plan, *size, settings, device, on_phase)
    model = case.build().to(device)
    inputs = {k: v.to(device) for k, v in case.inputs(asked.batch, asked.seq).items()}
    return PlanStep(run=make_step(model, inputs, case.loss, settings, on_phase))


class _Timed:
    """Repeats a step and keeps its times."""

    def __init__(
        self,
        step: PlanStep,
        marks: list[tuple[str, int]],
        device: str,
        together: bool,
        anchor: Callable[[], float] | None,
    ) -> None:
        self.step, self.marks, self.device = step, marks, device
        self.together, self.anchor = together, anchor
        self.phases: dict[str, list[float]] = {}
        self.log_anchors: list[float] = []

    def repeat(self, repetitions: int) -> dict[str, Any]:
        """Columns of the row."""
        for _ in range(WARMUP):
            self.once()
        gc.collect()
        gc.disable()
        first_us = self.once()
        count = max(repetitions, math.ceil(MIN_TIME_S * 1e6 / first_us))
        count = agree(count) if self.together else count
        self.phases.clear()
        self.log_anchors.clear()
        times = [self.once() for _ in range(count)]
        self.step.finish()
        timing = summarise(slowest(times) if self.together else times)
        logs = self.log_anchors
        return {
            **asdict(timing),
            **{f"{p}_us": summarise(self.phases[p]).time_us for p in PHASES if p in self.phases},
            **({"anchor_us": math.exp(sum(logs) / len(logs))} if logs else {}),
        }

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
        for (phase, at), until in zip(self.marks, ends, strict=True):
            self.phases.setdefault(phase, []).append((until - at) / 1e3)
        if self.anchor is not None:
            self.log_anchors.append(math.log(self.anchor()))
        return (end - start) / 1e3
