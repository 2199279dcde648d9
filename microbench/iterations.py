"""Measured iterations of a case: warm-up, repetitions, times by phase, the machine's speed."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

from microbench.cases.registry import EvalCase
from microbench.step import StepSettings, make_step
from microbench.timing import summarise

WARMUP = 3
MIN_TIME_S = 0.4
PHASES = ("zero_grad", "forward", "loss", "backward", "optimizer")


def measure_case(
    case: EvalCase,
    settings: StepSettings,
    device: str,
    *,
    repetitions: int = 20,
    anchor: Callable[[], float] | None = None,
) -> dict[str, Any]:
    """One row of family ``iteration``: at least ``repetitions`` steps and 0.4 s.

    ``anchor`` is timed after each step; ``anchor_us`` is its geometric mean. ``<phase>_us`` are
    medians by phase; on a GPU they are the host's times, not the device's.
    """
    import torch  # lazy: cases are listed without torch

    common = {"family": "iteration", "op": "train_step", "case": case.name, "plan": ""}
    common |= {"dtype": settings.dtype, "mode": settings.mode, "optimizer": settings.optimizer}
    row: dict[str, Any] = {**common, "batch": case.batch, "seq": case.seq, "reason": ""}
    marks: list[tuple[str, int]] = []
    try:
        model = case.build().to(device)
        inputs = {k: v.to(device) for k, v in case.inputs(case.batch, case.seq).items()}
        step = make_step(
            model,
            inputs,
            case.loss,
            settings,
            lambda phase: marks.append((phase, time.perf_counter_ns())),
        )
        for _ in range(WARMUP):
            step()
        gc.collect()
        gc.disable()
        return {**row, "status": "ok", **_repeat(step, marks, device, repetitions, anchor)}
    except (torch.cuda.OutOfMemoryError, MemoryError) as exc:
        return {**row, "status": "oom", "reason": str(exc)[:200]}
    finally:
        gc.enable()


def _repeat(
    step: Callable[[], None],
    marks: list[tuple[str, int]],
    device: str,
    repetitions: int,
    anchor: Callable[[], float] | None,
) -> dict[str, Any]:
    import torch  # lazy, as above

    times: list[float] = []
    logs: list[float] = []
    phases: dict[str, list[float]] = {}
    begin = time.perf_counter()
    while len(times) < repetitions or time.perf_counter() - begin < MIN_TIME_S:
        marks.clear()
        start = time.perf_counter_ns()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter_ns()
        times.append((end - start) / 1e3)
        ends = [at for _, at in marks[1:]] + [end]
        for (phase, at), until in zip(marks, ends, strict=True):
            phases.setdefault(phase, []).append((until - at) / 1e3)
        if anchor is not None:
            logs.append(math.log(anchor()))
    timing = summarise(times)
    return {
        "time_us": timing.time_us,
        "time_us_p20": timing.time_us_p20,
        "time_us_p80": timing.time_us_p80,
        "samples": timing.samples,
        **{f"{p}_us": summarise(phases[p]).time_us for p in PHASES if p in phases},
        **({"anchor_us": math.exp(sum(logs) / len(logs))} if logs else {}),
    }
