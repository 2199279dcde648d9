"""How long an epoch and a whole training take: steps, and what the script does between them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.durations import counted, in_words
from itercast.capture.input.lane import InputLane
from itercast.capture.programs.program import Training
from itercast.compose.forecast import Forecast
from itercast.eval.tables import sized
from itercast.microbench.store import Row

SAVED_BYTES_PER_S: float = assumed(__file__, "saved_bytes_per_s")
DISK = f"checkpoints written at {SAVED_BYTES_PER_S / 1e9:.1f} GB/s"
UNKNOWN = ("epoch_steps", "epoch_s", "training_steps", "training_s", "gpu_hours")


def training_facts(
    training: Training | None,
    step: Forecast,
    lane: InputLane | None,
    evaluations: Sequence[tuple[Forecast, InputLane | None]],
) -> Row:
    """Times of an epoch and of all, from a step and a batch of each evaluation with their input.

    What is not known is None. ``followed``: all that an epoch has is in it. ``assumes``: text.
    """
    facts: Row = dict.fromkeys(UNKNOWN)
    if training is None:
        return facts
    step_s, between_s = step.iteration_us * 1e-6, 0.0
    if training.epoch_steps:
        batches = [x.batches for x in training.evaluations]
        passes = [lane, *(evaluated for _, evaluated in evaluations)]
        times = {
            "evaluation_s": sum(
                n * batch.iteration_us * 1e-6
                for n, (batch, _) in zip(batches, evaluations, strict=True)
            ),
            "workers_start_s": sum(map(_start_s, filter(None, passes))),
            "saving_s": training.saved_bytes / SAVED_BYTES_PER_S,
        }
        between_s = sum(times.values())
        facts |= {"epoch_steps": training.epoch_steps, **times, "evaluation_batches": batches}
        facts |= {"epoch_s": training.epoch_steps * step_s + between_s}
        facts |= {"saved_bytes": training.saved_bytes, "followed": training.followed}
        facts |= {"assumes": DISK} if training.saved_bytes else {}
    if training.steps:
        epochs = training.steps / training.epoch_steps if training.epoch_steps else 0.0
        training_s = training.steps * step_s + epochs * between_s
        facts |= {"training_steps": training.steps, "training_s": training_s}
        facts["gpu_hours"] = training_s / 3600 * step.world_size
    return facts


def _start_s(lane: InputLane) -> float:
    """Seconds from the begin of a pass to its first batch, which the first of the workers makes."""
    started_us = lane.workers * lane.start_us
    return max(started_us, lane.start_us + lane.worker.mean_us) * 1e-6 if started_us else 0.0


def training_rows(facts: Row) -> list[tuple[str, str]]:
    """The same in words: the name and the text of each row of a table."""
    rows = list[tuple[str, str]]()
    if steps := facts["epoch_steps"]:
        text = f"{steps:,} step{'s' * (steps > 1)}, {in_words(facts['epoch_s'])}"
        passes, evaluation_s = facts["evaluation_batches"], facts["evaluation_s"]
        if not facts["followed"]:
            text += ", without " + ("what follows its evaluation" if passes else "its evaluation")
        rows.append(("an epoch", text))
        if passes:
            number = " + ".join(f"{n:,}" for n in passes)
            unit = "batch" if passes == [1] else "batches"
            rows.append(("its evaluation", f"{number} {unit}, {in_words(evaluation_s)} of it"))
        if facts["workers_start_s"]:
            rows.append(("its workers start", f"{in_words(facts['workers_start_s'])} of it"))
        if saved := facts["saved_bytes"]:
            rows.append(("it saves", f"{sized(saved)}, {in_words(facts['saving_s'])} of it"))
    if steps_in_all := facts["training_steps"]:
        epochs = steps_in_all / steps if steps else 0.0
        whole = epochs >= 1 and isclose(epochs, round(epochs), rel_tol=1e-3)
        name = counted(round(epochs), "epoch") if whole else "the training"
        text = f"{steps_in_all:,} steps, {in_words(facts['training_s'])}"
        rows.append((name, f"{text}, {facts['gpu_hours']:,.3g} GPU-hours"))
    return rows
