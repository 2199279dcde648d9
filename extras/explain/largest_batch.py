"""The largest batch whose memory fits: forecasts at a few sizes find it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from itercast.capture.opcall import StepCapture
from itercast.compose.capture_model import SizedModel
from itercast.compose.predict import prepare
from itercast.compose.target import Target, forecast_step
from itercast.microbench.store import Facts

TRIES = 8  # no assumption: memory grows nearly linearly, where two are enough


def largest_batch(model: Any, asked: Facts, step: StepCapture, target: Target) -> int:
    """The most samples of a micro-batch that fit under ``asked``.

    0 if not even one fits, and for a module, whose inputs have a fixed batch. ``step`` and
    ``target`` are those of ``asked``, the other arguments of ``predict``.
    """
    if not isinstance(model, str | Path | SizedModel):
        return 0
    first = forecast_step(step, target)

    def memory(samples: int) -> int:
        if samples == step.samples:
            return first.memory_bytes
        batch = samples * target.plan.microbatches
        return forecast_step(*prepare(model, **{**asked, "batch": batch})).memory_bytes

    return largest_that_fits(memory, first.memory_room_bytes, step.samples)


def largest_that_fits(memory: Callable[[int], int], room: int, own: int) -> int:
    """The most samples whose ``memory`` fits the room, by secants; 0 if not even one does.

    Each guess is the last one whose memory would fit if it grew linearly from ``own`` samples to
    the guess before.
    """
    first, guess, best = memory(own), 2 * own, 0
    for _ in range(TRIES):
        try:
            taken = memory(guess)
        except ValueError:  # a size that the model cannot run at
            break
        best = max(best, guess if taken <= room else 0)
        each = (taken - first) / (guess - own)
        last, guess = guess, max(1, int(own + (room - first) / max(each, 1.0)))
        if guess in (last, own):
            break
    return max(best, own if first <= room else 0)
