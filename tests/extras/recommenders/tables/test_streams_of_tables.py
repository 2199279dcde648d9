"""Index streams reach the forecast: of every table, forward and backward, by words or by file."""

from pathlib import Path

import pandas as pd
import pytest

from itercast.capture.opcall import StepCapture
from itercast.compose.capture_model import capture
from itercast.compose.graph.layers import split_layers
from itercast.extras.lookups.embedding_bag import FAMILY
from itercast.extras.recommenders.tables.known_streams import with_indices


@pytest.fixture(scope="module")
def step() -> StepCapture:
    return capture("dlrm-s")


def bags(step: StepCapture) -> list[object]:
    """Points of all embedding bags, in the order of calls."""
    return [p for c in step.calls if c.op in FAMILY.answers and (p := FAMILY.answers[c.op](c))]


def stream(folder: Path, tables: int, count: int) -> str:
    """A file in which table i looks its row 0 up in all bags, i + 1 times each."""
    rows = [
        {"indices": [0] * (count * n), "offsets": [b * n for b in range(count + 1)]}
        for n in range(1, tables + 1)
    ]
    path = folder / "stream.parquet"
    pd.DataFrame(rows).assign(table=[f"t{i}" for i in range(tables)]).to_parquet(path)
    return str(path)


def test_words_hold_for_all_tables(step: StepCapture) -> None:
    assert {p.skew for p in bags(step)} == {0.0}  # type: ignore[attr-defined]
    skewed = bags(with_indices(step, "zipf:1.05"))
    assert {p.skew for p in skewed} == {1.05} and len(skewed) == len(bags(step))  # type: ignore[attr-defined]
    assert with_indices(step, "") is step


def test_a_file_gives_each_table_its_own_stream_both_ways(
    step: StepCapture, tmp_path: Path
) -> None:
    """Table i looks its row 0 up in all bags, i + 1 times each."""
    forward = [p for p in bags(step) if p.op == "forward"]  # type: ignore[attr-defined]
    count = forward[0].bags  # type: ignore[attr-defined]
    found = bags(with_indices(step, stream(tmp_path, len(forward), count)))
    lookups = {
        way: [p.lookups // count for p in found if p.op == way]  # type: ignore[attr-defined]
        for way in ("forward", "backward")
    }
    assert lookups["forward"] == list(range(1, len(forward) + 1))
    if lookups["backward"]:
        assert lookups["backward"] == lookups["forward"][::-1]
    assert {p.unique for p in found} == {1}  # type: ignore[attr-defined]


def test_equal_tables_with_other_streams_are_not_folded(step: StepCapture, tmp_path: Path) -> None:
    """Six equal tables are one layer six times; with one lookup more each, they are six."""
    bags_each = next(p.bags for p in bags(step))  # type: ignore[attr-defined]

    def counts(found: StepCapture) -> list[int]:
        return [x.count for x in split_layers(found) if x.name.startswith("tables")]

    assert max(counts(step)) > 1
    assert set(counts(with_indices(step, stream(tmp_path, 6, bags_each)))) == {1}


def test_another_number_of_tables_is_refused(step: StepCapture, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"indices of 2 tables, the model looks up \d+ of them"):
        with_indices(step, stream(tmp_path, 2, 1))
