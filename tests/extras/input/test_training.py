"""The time of an epoch and of a whole training, from steps and what is between them, by hand."""

from dataclasses import replace

import pytest

from itercast.capture.base.durations import in_words
from itercast.capture.input.lane import Batches, InputLane
from itercast.capture.opcall import StepCapture
from itercast.capture.programs.program import Evaluation, ProgramCapture, Training
from itercast.compose.forecast import Forecast
from itercast.compose.programs.forecast import forecast_program
from itercast.compose.target import find_target
from itercast.extras.input.training import training_facts, training_rows

NOTHING = ProgramCapture(world_size=4, ranks={0: StepCapture(calls=())}, peak_bytes={0: 0})
LANE = InputLane(
    loader="x", workers=4, prefetch=2, batch_samples=8, batch_bytes=8, cores=8,
    worker=Batches(wall_us=(30_000.0,), cpu_us=(30_000.0,)), start_us=20_000.0,
)  # fmt: skip
TRAINING = Training(
    epoch_steps=125,
    steps=375,
    evaluations=(Evaluation(batches=13, program=NOTHING),),
    followed=True,
    saved_bytes=1_400_000_000,
)


def taking(milliseconds: float) -> Forecast:
    nothing = forecast_program(NOTHING, find_target("h100-sxm-80gb"))
    return replace(nothing, iteration_us=1e3 * milliseconds)


def test_an_epoch_has_steps_evaluations_starts_of_workers_and_checkpoints() -> None:
    """125 x 100 ms + 13 x 40 ms + 4 workers started in 20 ms each + 1.4 GB at 0.7 GB/s."""
    found = training_facts(TRAINING, taking(100), LANE, [(taking(40), None)])
    assert found["evaluation_s"] == pytest.approx(13 * 0.040)
    assert found["workers_start_s"] == pytest.approx(4 * 0.020)
    assert found["saving_s"] == pytest.approx(2.0)
    assert found["epoch_s"] == pytest.approx(12.5 + 0.52 + 0.08 + 2.0)
    assert found["training_s"] == pytest.approx(3 * found["epoch_s"])
    assert found["gpu_hours"] == pytest.approx(4 * found["training_s"] / 3600)
    assert training_rows(found) == [
        ("an epoch", "125 steps, 15.1 s"),
        ("its evaluation", "13 batches, 520 ms of it"),
        ("its workers start", "80 ms of it"),
        ("it saves", "1.4 GB, 2 s of it"),
        ("3 epochs", "375 steps, 45.3 s, 0.0503 GPU-hours"),
    ]
    assert found["assumes"] == "checkpoints written at 0.7 GB/s"


def test_the_first_batch_of_few_workers_is_waited_for() -> None:
    """The only worker is there after 20 ms, and its batch 30 ms later."""
    found = training_facts(TRAINING, taking(100), replace(LANE, workers=1), [(taking(40), None)])
    assert found["workers_start_s"] == pytest.approx(0.050)


def test_what_is_not_known_has_no_row() -> None:
    assert training_rows(training_facts(None, taking(100), None, [])) == []
    only_steps = training_facts(Training(steps=600_000), taking(100), None, [])
    assert training_rows(only_steps) == [
        ("the training", "600,000 steps, 16 h 40 min, 66.7 GPU-hours")
    ]
    unseen = training_facts(Training(epoch_steps=125), taking(100), LANE, [])
    assert training_rows(unseen)[0] == ("an epoch", "125 steps, 12.6 s, without its evaluation")
    assert unseen["training_s"] is None
    failed = replace(TRAINING, followed=False, saved_bytes=0)
    text = training_rows(training_facts(failed, taking(100), None, [(taking(40), None)]))[0][1]
    assert text == "125 steps, 13 s, without what follows its evaluation"


@pytest.mark.parametrize(
    ("duration_s", "words"),
    [(0.45, "450 ms"), (6.2, "6.2 s"), (511, "8 min 31 s"), (3599.9, "1 h 0 min"),
     (4920, "1 h 22 min"), (3 * 86400 + 4 * 3600, "3 d 4 h")],
)  # fmt: skip
def test_durations_in_words(duration_s: float, words: str) -> None:
    assert in_words(duration_s) == words
