"""Real files, mutated: each is accepted or refused in one line. `make endurance` reads 100,000."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from endurance.hostile import SHARES, Sample, failures, read_one, samples


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Sample]]:
    return samples(None, tmp_path_factory.mktemp("whole") / "bundle")


@pytest.mark.parametrize("kind", sorted({*SHARES} - {"bundles"}))
def test_mutated_files_are_answered_in_one_line(
    kind: str, known: Mapping[str, list[Sample]], tmp_path: Path
) -> None:
    files = known[kind]
    for number in range(40):
        sample, seed = files[number % len(files)], (number, *kind.encode())
        assert read_one(sample, seed, tmp_path / str(number)) == "", (number, sample.place)


def test_mutated_bundles_are_answered_in_one_line() -> None:
    """In a process of their own: a crash is one of the failures."""
    assert failures("bundles", 0, 40, None) == []


def test_a_traceback_is_a_failure_and_an_answer_is_none(tmp_path: Path) -> None:
    def read(error: Exception) -> str:
        def fail(folder: Path) -> None:
            raise error

        return read_one(Sample("x/y", b"12345", fail), (0,), tmp_path)

    assert read(KeyError("a")) == "KeyError: 'a'" and "no word" in read(ValueError(""))
    assert read(ValueError("line 3: no number")) == read(FileNotFoundError("x")) == ""
