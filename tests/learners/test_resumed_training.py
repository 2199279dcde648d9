"""Trainings that go on or elsewhere: trials after an interruption, families as Ray tasks."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from itercast.extras.fleet.training import ZIP, fitted, through_ray
from itercast.learners.bundle import Bundle
from itercast.learners.models import trees
from itercast.learners.models.training_table import Table
from itercast.learners.train import train
from itercast.learners.training_rows import usable_rows

PATIENCE_S = 60
# What the process runs that is killed: more trials than it can finish.
RUN = "import test_resumed_training as t, sys; t.tuned(sys.argv[1], 10_000)"


def table() -> Table:
    """Rows whose log ratio is a sum of two features."""
    x = np.random.default_rng(0).uniform(0, 1, (200, 2)).astype(np.float32)
    time_us, group = np.exp(x.sum(1)).astype(float), np.arange(len(x))
    return Table(x=x, roofline_us=np.ones(len(x)), time_us=time_us, group=group)


def tuned(storage: str | None, trials: int) -> trees.Tuned:
    return trees.tune(table(), trials, storage, "toy")


def finished(storage: str | None) -> list[dict[str, Any]]:
    """The parameters of the finished trials, in their order."""
    study = trees.open_study(storage, "toy")
    return [t.params for t in study.trials if t.value is not None]


def test_more_trials_go_on_where_the_first_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two and then five: the first two stay, and none of the others repeats them."""
    monkeypatch.setenv("ITERCAST_CACHE", str(tmp_path))
    tuned(None, 2)
    first = finished(None)
    tuned(None, 5)
    found = finished(None)
    assert len(found) == 5 and found[:2] == first
    assert len({p["eta"] for p in found}) == 5
    again = tuned(None, 5)
    assert finished(None) == found == [t["params"] for t in again.trials]
    assert again.options == min(again.trials, key=lambda t: t["value"])["params"]
    assert (tmp_path / "optuna" / "trials.db").is_file()


@pytest.mark.slow
def test_two_processes_share_the_trials_of_a_database(tmp_path: Path) -> None:
    """Ten trials are asked for in each: ten are run, or eleven if both began one at the end."""
    storage, here = f"sqlite:///{tmp_path}/shared.db", Path(__file__).parent
    trees.open_study(storage, "toy")  # so that two do not make the tables at once
    run = [sys.executable, "-c", RUN.replace("10_000", "10"), storage]
    workers = [subprocess.Popen(run, cwd=here) for _ in range(2)]
    assert [worker.wait(PATIENCE_S) for worker in workers] == [0, 0]
    found = finished(storage)
    assert len(found) in (10, 11)
    assert len({p["eta"] for p in found}) == len(found)


def test_a_database_that_is_none_is_one_line(tmp_path: Path) -> None:
    """Without its credentials."""
    for storage in ("sqlite:////no/such/folder/x.db", "nodb://me:secret@host/x", "text"):
        with pytest.raises(ValueError, match="no database that Optuna can use") as told:
            trees.open_study(storage, "toy")
        assert "secret" not in str(told.value) and "\n" not in str(told.value)


@pytest.mark.slow
def test_a_killed_training_repeats_no_finished_trial(tmp_path: Path) -> None:
    """Killed after two trials or more; asked for one more than had finished, it runs one."""
    storage, here = f"sqlite:///{tmp_path}/toy.db", Path(__file__).parent
    process = subprocess.Popen([sys.executable, "-c", RUN, storage], cwd=here)
    try:
        end = time.monotonic() + PATIENCE_S
        while len(finished(storage)) < 2:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    before = finished(storage)
    tuned(storage, len(before) + 1)
    after = finished(storage)
    assert after[: len(before)] == before and len(after) == len(before) + 1
    assert len({p["eta"] for p in after}) == len(after)


DATASETS = Path(__file__).parents[2] / "datasets"
ORDER = {"trials": 0, "memory": None, "storage": None, "gpus": {}, "anchors": []}


def test_a_task_returns_a_bundle_or_one_line(tmp_path: Path) -> None:
    """Bytes of a zip archive; of a root without such rows an error as JSON. No pickle."""
    order = {**ORDER, "name": "random", "data": [str(DATASETS)]}
    assert fitted(json.dumps(order).encode()).startswith(ZIP)
    found = json.loads(fitted(json.dumps({**order, "data": [str(tmp_path)]}).encode()))
    assert found == {"error": f"no family has 20 measured rows under {tmp_path}"}


@pytest.mark.slow
def test_ray_trains_what_this_process_trains(tmp_path: Path) -> None:
    """Two families on a cluster of this machine: all forecasts and scores equal."""
    names, rows = ["random", "pooling"], usable_rows([DATASETS], ["random", "pooling"])
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
