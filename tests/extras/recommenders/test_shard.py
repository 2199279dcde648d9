"""``itercast shard``: a ranking in torchrec's form; a wrong table, stream or plan gets a line."""

import json
import pickle
import shlex
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from typed_commands import typed
from typer.testing import CliRunner

from itercast.command_line import app

GOOD = {"name": "users", "rows": 100, "dim": 8, "pooling": 2}
WRONG = yaml.safe_load(Path(__file__).with_name("hostile_shards.yaml").read_text())


TABLES = """
batch: 64
features: 4
bottom: [8]
top: [8]
dim: 16
tables:
  - {name: users, rows: 100000, pooling: 20, indices: zipf:1.05}
  - {name: items, rows: 20000, pooling: 5}
  - {name: shops, rows: 300, pooling: 1}
"""


def test_shardings_are_ranked_and_the_fastest_is_written(tmp_path: Path) -> None:
    tables, plan = tmp_path / "tables.yaml", tmp_path / "plan.json"
    tables.write_text(TABLES)
    words = ["shard", str(tables), "--gpu", "h100-sxm-80gb", "--gpus", "2"]
    text = CliRunner().invoke(app, [*words, "--out", str(plan)]).output
    assert "greedy by forecast" in text and "slowest rank" in text and "first:" in text
    kept = json.loads(plan.read_text())
    assert set(kept) == {"users", "items", "shops"}
    facts = json.loads(CliRunner().invoke(app, [*words, "--sharding", str(plan), "--json"]).stdout)
    times = {s["name"]: s["iteration_us"] for s in facts["shardings"]}
    assert times["given"] == min(times.values()) and facts["plan"] == kept
    again = shlex.split(facts["command"])[1:]
    assert json.loads(CliRunner().invoke(app, [*again, "--json"]).stdout) == facts


def lines(tmp_path: Path, *tables: dict[str, Any], more: tuple[str, ...] = ()) -> str:
    """The one line that ``itercast shard`` ends with; it exits with 2."""
    path = tmp_path / "tables.yaml"
    path.write_text(yaml.safe_dump({"batch": 1, "tables": list(tables)}))
    arguments = ["shard", str(path), "--gpu", "h100-sxm-80gb", "--gpus", "2", *more]
    found = typed(*arguments, rc=2)
    assert len(found.output.strip().splitlines()) == 1 and "Traceback" not in found.output
    return found.output


@pytest.mark.parametrize("wrong", WRONG["tables"])
def test_hostile_tables(tmp_path: Path, wrong: str) -> None:
    changed, said = WRONG["tables"][wrong]
    found = lines(tmp_path, {**GOOD, "name": "items"}, {**GOOD, **changed})
    assert said in found


@pytest.mark.parametrize("wrong", WRONG["streams"])
def test_hostile_streams(tmp_path: Path, wrong: str) -> None:
    """Two ranks of one sample each look two bags up."""
    columns, said = WRONG["streams"][wrong]
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


@pytest.mark.parametrize("wrong", WRONG["plans"])
def test_hostile_plans(tmp_path: Path, wrong: str) -> None:
    plan, said = WRONG["plans"][wrong]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"users": plan} if "sharding_type" in plan else plan))
    assert said in lines(tmp_path, GOOD, more=("--sharding", str(path)))
