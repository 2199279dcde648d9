"""What times whole processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.speed import timed_s
from learners.bundle import SHIPPED_CPU, Bundle


def test_a_process_is_timed_and_heard(tmp_path: Path) -> None:
    seconds, said = timed_s(["-c", "import os; print(os.getcwd())"], str(tmp_path))
    assert seconds > 0
    assert said == f"{tmp_path}\n"


def test_a_process_that_fails_is_one_line_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"python -m no_such_module: exit code 1: .*No module"):
        timed_s(["-m", "no_such_module"], str(tmp_path))


def test_speed_is_measured_on_a_bundle_that_ships() -> None:
    assert [gpu.kind for gpu in Bundle.load(SHIPPED_CPU).gpus.values()] == ["cpu"]
