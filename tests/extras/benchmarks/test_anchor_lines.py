"""Steps of two models on one machine that takes 1.2 times as long as forecast, one on another."""

from pathlib import Path

import pandas as pd
import pytest
import yaml

from itercast.anchors import measured_steps
from itercast.compose.target import forecast_step
from itercast.extras.benchmarks.anchors import anchored, lines, pairs
from itercast.options import Question

SLOWER = 1.2
ASKED = [
    ("gpt2-small", 2, "a100-sxm-80gb"),
    ("gpt2-small", 4, "a100-sxm-80gb"),
    ("bert-base", 4, "a100-sxm-80gb"),
    ("gpt2-small", 2, "a100-sxm-80gb"),
    ("gpt2-small", 8, "h100-sxm-80gb"),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five measured steps: the fourth is of the first one's configuration."""
    path = tmp_path_factory.mktemp("steps") / "own.yaml"
    steps = [
        {"case": case, "batch": batch, "gpu": gpu, "plan": "amp", "step_ms": 1.0}
        for case, batch, gpu in ASKED
    ]
    path.write_text(yaml.safe_dump(steps))
    for step, read in zip(steps, measured_steps(path, Question), strict=True):
        step["step_ms"] = SLOWER * forecast_step(read.step, read.target).iteration_us / 1e3
    path.write_text(yaml.safe_dump(steps))
    return path


def test_an_anchor_is_the_next_step_of_another_run(file: Path) -> None:
    """The first and the fourth take each other for no anchor; the only BERT has none of its own.

    The one on an H100 has none, and is none.
    """
    found = list(pairs(measured_steps(file, Question)))
    same, other = "of the same model", "of another model"
    assert found == [
        *((same, 0, 1), (other, 0, 2), (same, 1, 3), (other, 1, 2)),
        *((other, 2, 3), (same, 3, 1), (other, 3, 2)),
    ]


def test_errors_without_and_with_an_anchor_are_counted_by_source(file: Path) -> None:
    """1 / 1.2 is 16.7 % too short; either anchor leaves less, and none makes it too long."""
    found = lines(pd.DataFrame(anchored("own", measured_steps(file, Question))))
    assert found["steps"].to_dict() == {"of the same model": 3, "of another model": 4}
    assert found["sources"].tolist() == [1, 1]
    assert found["error % without"].tolist() == pytest.approx([100 * (1 - 1 / SLOWER)] * 2)
    assert (found["bias % without"] == -found["error % without"]).all()
    assert found["bias % with"].between(-16, 0, inclusive="neither").all()
