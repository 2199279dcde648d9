"""``itercast shard`` and plans with ``shard``: each wrong table, stream or plan gets one line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from typer.testing import CliRunner

from itercast.__main__ import app

GOOD = {"name": "users", "rows": 100, "dim": 8, "pooling": 2}
HUGE = 2**62
# By what is wrong: keys of the table, and a part of the line.
TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "negative rows": ({"rows": -1}, "rows is a number of at least 0"),
    "no rows": ({"rows": 0}, "rows is from 1 to"),
    "too many rows": ({"rows": HUGE}, "rows is from 1 to"),
    "half a row": ({"rows": 1.5}, "rows is a whole number"),
    "rows as text": ({"rows": "many"}, "rows is a number of at least 0"),
    "NaN pooling": ({"pooling": float("nan")}, "pooling is a number of at least 0"),
    "endless pooling": ({"pooling": float("inf")}, "pooling is a number of at least 0"),
    "no lookups": ({"pooling": 0}, "pooling is a number above 0"),
    "unknown dtype": ({"dtype": "int64"}, "allowed are fp32, fp16, bf16"),
    "unknown key": ({"row": 5}, "unknown key 'row'"),
    "weights as text": ({"weighted": "yes"}, "weighted is true or false"),
    "another dim": ({"dim": 4}, "the interaction needs one dim"),
    "the name of another": ({"name": "items"}, "'items': the name is given twice"),
    "negative exponent": ({"indices": "zipf:-1"}, "exponent is a number from 0"),
    "NaN exponent": ({"indices": "zipf:nan"}, "exponent is a number from 0"),
    "no such stream": ({"indices": "nowhere.parquet"}, "uniform, zipf:EXPONENT, or a file"),
}
# By what is wrong: columns of a stream of two bags, and a part of the line.
STREAMS: dict[str, tuple[dict[str, Any], str]] = {
    "negative index": ({"indices": [0, -1], "offsets": [0, 1, 2]}, "index -1 is negative"),
    "huge index": ({"indices": [0, HUGE], "offsets": [0, 1, 2]}, "the table has 100 rows"),
    "offsets going back": ({"indices": [0, 1], "offsets": [0, 3, 2]}, "offsets go back from 3"),
    "offsets not from 0": ({"indices": [0, 1], "offsets": [1, 1, 2]}, "offsets go from 0"),
    "offsets too short": ({"indices": [0, 1], "offsets": [0, 1, 1]}, "offsets go from 0"),
    "empty bags alone": ({"indices": [], "offsets": [0, 0, 0]}, "no lookups in"),
    "fractions": ({"indices": [0.5, 1.0], "offsets": [0, 1, 2]}, "a list of integers"),
    "words": ({"indices": ["a", "b"], "offsets": [0, 1, 2]}, "a list of integers"),
    "fewer bags than samples": ({"indices": [0], "offsets": [0, 1]}, "bags in the file"),
    "no such column": ({"indices": [0], "starts": [0, 1]}, "no column 'offsets'"),
}
PLANS: dict[str, tuple[Any, str]] = {
    "unknown table": ({"others": {"sharding_type": "row_wise", "ranks": [0, 1]}}, "unknown table"),
    "no table": ({}, "no sharding"),
    "unknown rank": ({"sharding_type": "table_wise", "ranks": [7]}, "from 0 to 1"),
    "negative rank": ({"sharding_type": "table_wise", "ranks": [-1]}, "from 0 to 1"),
    "rank twice": ({"sharding_type": "row_wise", "ranks": [0, 0]}, "different numbers"),
    "rank as text": ({"sharding_type": "table_wise", "ranks": ["0"]}, "a list of ranks"),
    "unknown kind": ({"sharding_type": "wise", "ranks": [0]}, "sharding_type"),
    "a list": ([], "expected a table's name"),
}


def lines(tmp_path: Path, *tables: dict[str, Any], more: tuple[str, ...] = ()) -> str:
    """The one line that ``itercast shard`` ends with; it exits with 2."""
    path = tmp_path / "tables.yaml"
    path.write_text(yaml.safe_dump({"batch": 1, "tables": list(tables)}))
    arguments = ["shard", str(path), "--gpu", "h100-sxm-80gb", "--gpus", "2", *more]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2, found.output
    assert len(found.output.strip().splitlines()) == 1 and "Traceback" not in found.output
    return found.output


@pytest.mark.parametrize("wrong", TABLES)
def test_hostile_tables(tmp_path: Path, wrong: str) -> None:
    changed, said = TABLES[wrong]
    found = lines(tmp_path, {**GOOD, "name": "items"}, {**GOOD, **changed})
    assert said in found


@pytest.mark.parametrize("wrong", STREAMS)
def test_hostile_streams(tmp_path: Path, wrong: str) -> None:
    """Two ranks of one sample each look two bags up."""
    columns, said = STREAMS[wrong]
    path = tmp_path / "stream.parquet"
    pd.DataFrame([{"table": "users", **columns}]).to_parquet(path)
    assert said in lines(tmp_path, {**GOOD, "indices": str(path)})


@pytest.mark.parametrize("wrong", ["pickle", "tensor", "text", "lengths", "folder"])
def test_hostile_tensor_files(tmp_path: Path, wrong: str) -> None:
    """Nothing in a file is run."""
    path, mark = tmp_path / "stream.pt", tmp_path / "ran"
    one = torch.zeros(2, dtype=torch.int64)
    if wrong == "pickle":
        path.write_bytes(pickle.dumps(_Runs(mark)))
    elif wrong == "folder":
        path.mkdir()
    elif wrong == "text":
        path.write_text("not tensors")
    else:
        torch.save(one if wrong == "tensor" else (one, one, one), path)
    assert "indices" in lines(tmp_path, {**GOOD, "indices": str(path)})
    assert not mark.exists()


class _Runs:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("wrong", PLANS)
def test_hostile_plans(tmp_path: Path, wrong: str) -> None:
    plan, said = PLANS[wrong]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"users": plan} if "sharding_type" in plan else plan))
    assert said in lines(tmp_path, GOOD, more=("--sharding", str(path)))
