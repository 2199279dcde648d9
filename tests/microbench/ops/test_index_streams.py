"""Index streams: stated in words, read from files without running them, refused by one line."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from itercast.microbench.ops.lookup.index_streams import parse_indices

GOOD = {"table": "users", "indices": [3, 3, 3, 1, 0], "offsets": [0, 2, 2, 5]}


def parquet(path: Path, *rows: dict[str, Any]) -> str:
    pd.DataFrame(rows).to_parquet(path / "stream.parquet")
    return str(path / "stream.parquet")


def test_facts_of_a_file_by_hand(tmp_path: Path) -> None:
    """Bags (3, 3), (), (3, 1, 0): row 3 three times, rows 1 and 0 once; lengths 2, 0, 3."""
    (stream,) = parse_indices(parquet(tmp_path, GOOD))
    facts = stream.facts(rows=4, bags=3)
    lengths = np.array([2, 0, 3])
    assert facts == {
        "lookups": 5,
        "unique": 3,
        "reuse": "0.6667 0 0.3333",
        "spread": pytest.approx(lengths.std() / lengths.mean(), abs=1e-3),
    }
    assert stream.facts(rows=4, bags=1) == {"lookups": 2, "unique": 1, "reuse": "0 1", "spread": 0}


def test_tensors_of_several_tables_are_read(tmp_path: Path) -> None:
    """Two tables of two bags: (5), (6, 7) and (1, 1), (); one file zipped, one not."""
    indices, offsets = torch.tensor([5, 6, 7, 1, 1]), torch.tensor([0, 1, 3, 5])
    whole = (indices, torch.cat([offsets, torch.tensor([5])]), torch.tensor([[1, 2], [2, 0]]))
    torch.save(whole, tmp_path / "a.pt")
    (tmp_path / "a.pt.gz").write_bytes(gzip.compress((tmp_path / "a.pt").read_bytes()))
    for name in ("a.pt", "a.pt.gz"):
        first, second = parse_indices(str(tmp_path / name))
        assert first.facts(rows=8, bags=2)["lookups"] == 3
        assert second.facts(rows=8, bags=2)["reuse"] == "0 1"


def test_words_for_streams() -> None:
    assert parse_indices("uniform")[0].facts(rows=10, bags=5) == {}
    assert parse_indices("zipf:1.05")[0].facts(rows=10, bags=5) == {"skew": 1.05}
    for other in ("zipf:", "zipf:x", "zipf:-1", "zipf:nan", "normal", ""):
        with pytest.raises(ValueError, match="indices"):
            parse_indices(other)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"indices": [3, -1, 2, 1, 0]}, "index -1 is negative"),
        ({"offsets": [0, 4, 2, 5]}, "offsets go back from 4 to 2"),
        ({"offsets": [1, 2, 5]}, "offsets go from 0 to the number of indices"),
        ({"offsets": [0, 2, 9]}, "offsets go from 0 to the number of indices"),
        ({"offsets": []}, "offsets go from 0"),
        ({"indices": [0.5, 1.0]}, "list of integers, got float64"),
        ({"indices": ["a"]}, "list of integers"),
        ({"indices": None, "offsets": [0, 0, 0]}, "no lookups in 2 bags"),
        ({"indices": [9, 1, 2, 1, 0]}, "row 9, the table has 4 rows"),
        ({"offsets": [0, 5]}, "1 bags in the file, the batch has 2"),
    ],
)
def test_hostile_streams_are_refused_in_a_line(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match="indices.*" + said) as refused:
        parse_indices(parquet(tmp_path, GOOD | changed))[0].facts(rows=4, bags=2)
    assert "\n" not in str(refused.value)


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_files_are_not_executed(tmp_path: Path) -> None:
    """Neither a pickle of other things than tensors, nor garbage, nor another number of them."""
    target = tmp_path / "executed"
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Malicious(target)))
    (tmp_path / "b.pt").write_bytes(b"garbage")
    torch.save((torch.ones(1), torch.ones(1)), tmp_path / "c.pt")
    (tmp_path / "d.parquet").write_bytes(b"garbage")
    for name in ("a.pt", "b.pt", "c.pt", "d.parquet"):
        with pytest.raises(ValueError, match=name) as refused:
            parse_indices(str(tmp_path / name))
        assert "\n" not in str(refused.value)
    assert not target.exists()
