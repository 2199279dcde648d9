"""A training that is stopped keeps the families it has finished, and continues with the others."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest

from itercast.learners.features.machine_speed import Anchors
from itercast.learners.train import Fits, OnProgress, TrainSettings, fit_in_turn, train
from itercast.learners.unfinished import forget, resumed, unfinished

ROOT = Path(__file__).parents[2]
DATA, NAMES = ROOT / "datasets", ["random", "pooling"]


def content(folder: Path) -> dict[str, bytes]:
    """The models of a bundle, file by file."""
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*")) if p.suffix != ".json"}


@pytest.mark.slow
def test_a_stopped_training_goes_on_with_the_families_that_are_left(tmp_path: Path) -> None:
    trained: list[list[str]] = []

    def one_then_stop(
        tables: Mapping[str, pd.DataFrame],
        anchors: Anchors,
        asked: TrainSettings,
        told: OnProgress | None,
    ) -> Fits:
        trained.append(list(tables))
        yield next(iter(fit_in_turn(tables, anchors, asked, told)))
        if len(tables) > 1:
            raise KeyboardInterrupt

    out = tmp_path / "bundle"
    with pytest.raises(KeyboardInterrupt):
        train([DATA], out, NAMES, fit_all=resumed(out, one_then_stop))
    assert not out.exists() and [p.name for p in unfinished(out).iterdir()] == [NAMES[0]]
    train([DATA], out, NAMES, fit_all=resumed(out, one_then_stop))
    assert trained == [NAMES, NAMES[1:]]
    train([DATA], tmp_path / "whole", NAMES)
    assert content(out) == content(tmp_path / "whole")
    forget(out)
    assert not unfinished(out).exists()


@pytest.mark.slow
def test_ctrl_c_ends_a_training_in_one_line(tmp_path: Path) -> None:
    """Sent to the real program as soon as its first family is kept."""
    words = ["train", "--data", str(DATA), "--family", ",".join(NAMES), "--out", "bundle"]
    program = subprocess.Popen(
        [sys.executable, "-m", "itercast", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    place, end = unfinished(tmp_path / "bundle") / NAMES[0], time.monotonic() + 300
    while not place.is_dir() and time.monotonic() < end and program.poll() is None:
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    _, told = program.communicate(timeout=60)
    assert program.returncode == 130, told
    assert told.strip().splitlines()[-1] == (
        "itercast: stopped; what is trained so far is kept beside bundle; the same command goes on"
    )
    assert "Traceback" not in told
