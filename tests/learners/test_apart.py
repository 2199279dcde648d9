"""Families trained as Ray tasks: the same bundle as here, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from itercast.learners.apart import ZIP, fitted, through_ray
from itercast.learners.beyond_memory import usable_rows
from itercast.learners.bundle import Bundle
from itercast.learners.train import train

DATASETS = Path(__file__).parents[2] / "datasets"
ORDER = {"trials": 0, "memory": None, "storage": None, "compare": False, "anchors": []}


def test_a_task_returns_a_bundle_or_one_line(tmp_path: Path) -> None:
    """Bytes of a zip archive; of a root without such rows an error as JSON. No pickle."""
    order = {**ORDER, "name": "random", "data": [str(DATASETS)]}
    assert fitted(json.dumps(order).encode()).startswith(ZIP)
    found = json.loads(fitted(json.dumps({**order, "data": [str(tmp_path)]}).encode()))
    assert found == {"error": f"no family has 20 measured rows under {tmp_path}"}


@pytest.mark.slow
def test_ray_trains_what_this_process_trains(tmp_path: Path) -> None:
    """Two families on a cluster of this machine: all forecasts and scores equal."""
    names, rows = ["random", "attention"], usable_rows([DATASETS], ["random", "attention"])
    here = train([DATASETS], tmp_path / "here", names)
    apart = through_ray("local", [str(DATASETS)])
    there = train([DATASETS], tmp_path / "there", names, fit_all=apart)
    for name in names:
        mine, theirs = (
            Bundle.load(tmp_path / f).price(name, rows[name]) for f in ("here", "there")
        )
        pd.testing.assert_frame_equal(mine, theirs, rtol=1e-6)
        scores = [pd.DataFrame(r.families[name].learners) for r in (here, there)]
        pd.testing.assert_frame_equal(*scores, rtol=1e-6)
    pd.testing.assert_frame_equal(here.held_out(), there.held_out(), rtol=1e-6)
    with pytest.raises(ValueError, match=r"memory 9000\.0GiB: no Ray node has more than"):
        train([DATASETS], tmp_path / "x", names, memory=9000 * 2**30, fit_all=apart)
    with pytest.raises(ValueError, match=": no family has 20 measured rows"):
        train([DATASETS], tmp_path / "x", names, fit_all=through_ray("local", [str(tmp_path)]))
