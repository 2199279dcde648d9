"""Real files, mutated: each is accepted or refused in one line. `make endurance` reads 100,000."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from endurance.hostile import SHARES, Sample, failures, mutated, read_one

HOSTILE = Path(__file__).with_name("endurance") / "hostile.py"


@pytest.mark.parametrize("kind", SHARES)
def test_mutated_files_are_answered_in_one_line(kind: str) -> None:
    """In a process of their own: a crash is one of the failures."""
    assert failures(kind, 0, 40, None) == []


def test_a_traceback_is_a_failure_and_an_answer_is_none(tmp_path: Path) -> None:
    def read(error: Exception) -> str:
        def fail(folder: Path) -> None:
            raise error

        return read_one(Sample("x/y", b"12345", fail), (0,), tmp_path)

    assert read(KeyError("a")) == "KeyError: 'a'" and "no word" in read(ValueError(""))
    assert read(ValueError("line 3: no number")) == read(FileNotFoundError("x")) == ""


def test_files_are_mutated_the_same_way_again() -> None:
    """A failure can be repeated by its number."""
    drawn = [mutated(b"a: 1\nb: 2\n" * 9, np.random.default_rng((n, 7))) for n in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] != b"a: 1\nb: 2\n" * 9


def test_an_unknown_kind_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, HOSTILE, "--kind", "dogs"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "invalid choice: 'dogs'" in done.stderr
