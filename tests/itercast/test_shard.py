"""The command ``itercast shard``: a ranking, a plan in torchrec's form, refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from itercast.__main__ import app

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


@pytest.fixture
def tables(tmp_path: Path) -> str:
    (tmp_path / "tables.yaml").write_text(TABLES)
    return str(tmp_path / "tables.yaml")


def run(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["shard", *words])
    return found.exit_code, found.output


def test_shardings_are_ranked_and_the_fastest_is_written(tables: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    where = ("--gpu", "h100-sxm-80gb", "--gpus", "2")
    code, text = run(tables, *where, "--out", str(plan))
    assert code == 0 and "greedy by forecast" in text and "slowest rank" in text
    assert "first:" in text and any(f"'{name}'" in text for name in ("users", "items"))
    kept = json.loads(plan.read_text())
    assert set(kept) == {"users", "items", "shops"}
    code, text = run(tables, *where, "--sharding", str(plan), "--json")
    facts = json.loads(text)
    times = {s["name"]: s["iteration_us"] for s in facts["shardings"]}
    assert code == 0 and times["given"] == min(times.values()) and facts["plan"] == kept


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "h900", "--gpus", "2"), "h900"),
        (("--gpu", "l4", "--gpus", "2", "--sharding", "nowhere.json"), "nowhere.json"),
        (("--gpu", "l4", "--gpus", "2", "--node", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_refused_in_a_line(tables: str, words: tuple[str, ...], said: str) -> None:
    code, text = run(tables, *words)
    assert code == 2 and said in text and len(text.strip().splitlines()) == 1
