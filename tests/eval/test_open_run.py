"""Runs that exist while a command works, in a real SQLite store: how each of them ends."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from itercast.eval.tracking import store
from itercast.eval.tracking.open_run import open_run

KILLED = """
import os
from itercast.eval.tracking.open_run import open_run
with open_run("lost", {}):
    os.kill(os.getpid(), 9)
"""


def runs() -> dict[str, Any]:
    """All runs of trainings by name."""
    client = store.connect()
    place = client.get_experiment_by_name("trainings")
    assert place is not None
    return {run.info.run_name: run for run in client.search_runs([place.experiment_id])}


def test_a_run_is_there_from_the_first_second(mlflow_store: str) -> None:
    with open_run("mine", {"trials": 3}) as run:
        run.progress("families", 2)
        found = runs()["mine"]
        assert found.info.status == "RUNNING" and found.data.params == {"trials": "3"}
        assert found.data.tags["families"] == "2" and not found.data.metrics
    assert runs()["mine"].info.status == "FINISHED"


@pytest.mark.parametrize(
    ("raised", "ends"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_a_run_ends_as_its_command_does(
    mlflow_store: str, raised: type[BaseException], ends: str
) -> None:
    with pytest.raises(raised), open_run("mine", {}):
        raise raised
    assert runs()["mine"].info.status == ends


def test_a_run_whose_command_is_gone_is_ended_by_the_next(mlflow_store: str) -> None:
    """As after a loss of power; that of a living command stays."""
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert runs()["lost"].info.status == "RUNNING"
    with open_run("first", {}), open_run("second", {}):
        assert {n: r.info.status for n, r in runs().items()} == {
            "lost": "KILLED",
            "first": "RUNNING",
            "second": "RUNNING",
        }


@pytest.mark.parametrize("place", ["http://127.0.0.1:9", "sqlite:///damaged.db"])
def test_without_a_store_the_command_works(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning at once, and no further attempts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.db").write_text("no database")
    monkeypatch.setattr("itercast.eval.tracking.open_run.warned", set())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    with open_run("mine", {}) as run:
        run.progress("families", 1)
    assert len(caplog.records) == 1 and "not logged to MLflow" in caplog.text
