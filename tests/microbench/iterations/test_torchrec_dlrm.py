"""torchrec's DistributedModelParallel computes what our step of a sharded DLRM does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RANKS, ROWS, DIM = 2, 10, 8
WORKER = Path(__file__).with_name("torchrec_dlrm_rank.py")
WHOLE = {"first_row": 0, "rows": ROWS, "first_column": 0, "columns": DIM}
HALF_ROWS = [{**WHOLE, "first_row": 5 * r, "rows": 5, "rank": r} for r in range(2)]
HALF_COLUMNS = [{**WHOLE, "first_column": 4 * r, "columns": 4, "rank": 1 - r} for r in range(2)]
COPIES = [{**WHOLE, "rank": r, "local": True} for r in range(2)]
ON_0, ON_1 = ([{**WHOLE, "rank": r}] for r in range(2))
PLACES = {
    "tables on both": (ON_0, ON_1),
    "all on one rank": (ON_1, ON_1),
    "columns and rows": (HALF_COLUMNS, HALF_ROWS),
    "a copy, rows, a table": (COPIES, HALF_ROWS, ON_0),
}
pytest.importorskip("torchrec", reason="torchrec is not installed", exc_type=ImportError)


def order(place: str, optimizer: str) -> dict[str, Any]:
    """The model of a placement, as JSON for its ranks."""
    shards = [{**s, "table": t} for t, some in enumerate(PLACES[place]) for s in some]
    tables = [{"rows": ROWS, "dim": DIM, "pooling": 3} for _ in PLACES[place]]
    sizes = {"batch": 6, "features": 2, "bottom": [3], "top": [3], "optimizer": optimizer}
    return {**sizes, "tables": tables, "shards": shards}


def test_two_ranks_compute_what_our_step_does(tmp_path: Path) -> None:
    """Logits, and tables after a step, of each placement by SGD; of one by Adagrad."""
    orders = {place: order(place, "sgd") for place in PLACES}
    orders["adagrad"] = order("tables on both", "adagrad")
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={RANKS}", str(WORKER), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-800:]
    for name in orders:
        changed = 0.0
        for rank in range(RANKS):
            found = torch.load(tmp_path / f"{name} {rank}.pt", weights_only=True)
            ours, theirs = found["logits"]
            assert torch.allclose(ours, theirs, atol=1e-5), name
            ours, theirs = found["tables"]
            assert ours.keys() == theirs.keys()
            for (table, row, column), part in ours.items():
                assert torch.allclose(part, theirs[table, row, column], atol=1e-6), name
                rows, columns = part.shape
                before = found["before"][table][row : row + rows, column : column + columns]
                changed += float((part - before).abs().sum())
        assert changed > 0
