"""Real files, mutated: each is accepted or refused in one line. `make endurance` reads 100,000."""

from __future__ import annotations

from pathlib import Path

import pytest
from endurance.hostile import SHARES, Sample, failures, read_one


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
