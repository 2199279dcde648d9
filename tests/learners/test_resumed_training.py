"""An interrupted training resumes: no finished hyperparameter trial is run again."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from itercast.learners.models import trees
from itercast.learners.models.training_table import Table

PATIENCE_S = 60
# What the process runs that is killed: more trials than it can finish.
RUN = "import test_resumed_training as t, sys; t.tuned(sys.argv[1], 10_000)"


def table() -> Table:
    """Rows whose log ratio is a sum of two features."""
    x = np.random.default_rng(0).uniform(0, 1, (200, 2)).astype(np.float32)
    time_us, group = np.exp(x.sum(1)).astype(float), np.arange(len(x))
    return Table(x=x, roofline_us=np.ones(len(x)), time_us=time_us, group=group)


def tuned(journal: str, trials: int) -> dict[str, Any]:
    return trees.tune(table(), trials, 0, journal, "toy")


def finished(journal: Path) -> list[dict[str, Any]]:
    """The parameters of the finished trials, in their order."""
    if not journal.is_file():
        return []
    study = trees.open_study(str(journal), "toy")
    return [t.params for t in study.trials if t.value is not None]


def test_more_trials_go_on_where_the_first_stopped(tmp_path: Path) -> None:
    """Two and then five: the first two stay, and none of the others repeats them."""
    journal = tmp_path / "toy.log"
    tuned(str(journal), 2)
    first = finished(journal)
    tuned(str(journal), 5)
    found = finished(journal)
    assert len(found) == 5 and found[:2] == first
    assert len({p["eta"] for p in found}) == 5
    best = tuned(str(journal), 5)
    assert finished(journal) == found and best in found


@pytest.mark.slow
def test_a_killed_training_repeats_no_finished_trial(tmp_path: Path) -> None:
    """Killed after two trials or more; asked for one more than had finished, it runs one."""
    journal, here = tmp_path / "toy.log", Path(__file__).parent
    process = subprocess.Popen([sys.executable, "-c", RUN, str(journal)], cwd=here)
    try:
        end = time.monotonic() + PATIENCE_S
        while len(finished(journal)) < 2:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    before = finished(journal)
    tuned(str(journal), len(before) + 1)
    after = finished(journal)
    assert after[: len(before)] == before and len(after) == len(before) + 1
    assert len({p["eta"] for p in after}) == len(after)
