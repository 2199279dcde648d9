"""Measured iterations of a case: warm-up, repetitions, raw and corrected for machine speed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from microbench.cases.registry import EvalCase
from microbench.step import StepSettings, make_step
from microbench.timing import summarise

WARMUP = 3
MIN_TIME_S = 0.4


def measure_case(
    case: EvalCase,
    settings: StepSettings,
    device: str,
    *,
    repetitions: int = 20,
    between: Callable[[], float] = lambda: 1.0,
) -> dict[str, Any]:
    """One row of family ``iteration``; ``between`` tells the machine's speed after each step.

    At least ``repetitions`` steps and 0.4 s. ``time_us`` is at reference speed, ``raw_us`` is as
    the clock saw it.
    """
    import torch  # lazy: cases are listed without torch

    common = {"family": "iteration", "op": "train_step", "case": case.name, "plan": ""}
    common |= {"dtype": settings.dtype, "mode": settings.mode, "optimizer": settings.optimizer}
    row: dict[str, Any] = {**common, "batch": case.batch, "seq": case.seq, "reason": ""}
    try:
        model = case.build().to(device)
        inputs = {k: v.to(device) for k, v in case.inputs(case.batch, case.seq).items()}
        step = make_step(model, inputs, case.loss, settings)
        for _ in range(WARMUP):
            step()
        gc.collect()
        gc.disable()
        raw, corrected = _repeat(step, device == "cuda", repetitions, between)
    except (torch.cuda.OutOfMemoryError, MemoryError) as exc:
        return {**row, "status": "oom", "reason": str(exc)[:200]}
    finally:
        gc.enable()
    timing = summarise(corrected)
    return {
        **row,
        "status": "ok",
        "time_us": timing.time_us,
        "time_us_p20": timing.time_us_p20,
        "time_us_p80": timing.time_us_p80,
        "samples": timing.samples,
        "raw_us": summarise(raw).time_us,
    }


def _repeat(
    step: Callable[[], None], synchronise: bool, repetitions: int, between: Callable[[], float]
) -> tuple[list[float], list[float]]:
    import torch  # lazy, as above

    raw: list[float] = []
    corrected: list[float] = []
    begin = time.perf_counter()
    before = between()
    while len(raw) < repetitions or time.perf_counter() - begin < MIN_TIME_S:
        start = time.perf_counter_ns()
        step()
        if synchronise:
            torch.cuda.synchronize()
        raw.append((time.perf_counter_ns() - start) / 1e3)
        after = between()
        corrected.append(raw[-1] * (before * after) ** 0.5)
        before = after
    return raw, corrected
