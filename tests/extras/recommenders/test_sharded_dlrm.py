"""Sharded DLRMs: two processes compute what one does, whatever the placement of tables."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from itercast.extras.recommenders.models.dlrm import DenseDlrm
from itercast.extras.recommenders.sharded_dlrm import LEARNING_RATE

ROWS, DIM, BATCH, POOLING = 10, 4, 6, 3
RANKS = 2
WORKER = Path(__file__).with_name("sharded_dlrm_rank.py")
WHOLE = {"first_row": 0, "rows": ROWS, "first_column": 0, "columns": DIM}
HALF_ROWS = [{**WHOLE, "first_row": 5 * r, "rows": 5, "rank": r} for r in range(2)]
HALF_COLUMNS = [{**WHOLE, "first_column": 2 * r, "columns": 2, "rank": 1 - r} for r in range(2)]
COPIES = [{**WHOLE, "rank": r, "local": True} for r in range(2)]
PLACES = {
    "table-wise": ([{**WHOLE, "rank": 0}], [{**WHOLE, "rank": 1}]),
    "all on one rank": ([{**WHOLE, "rank": 1}], [{**WHOLE, "rank": 1}]),
    "column- and row-wise": (HALF_COLUMNS, HALF_ROWS),
    "a local copy": (COPIES, HALF_ROWS),
    "copies only": (COPIES, COPIES),
}


def order(place: str) -> dict[str, Any]:
    """The model of a placement, as JSON for its ranks."""
    table = {"name": "t", "rows": ROWS, "dim": DIM, "pooling": POOLING}
    shards = [{**s, "table": t} for t, some in enumerate(PLACES[place]) for s in some]
    sizes = {"batch": BATCH, "features": 2, "bottom": [3], "top": [3]}
    return {**sizes, "tables": [table, table], "shards": shards}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank computed, by placement; two ranks run all of them, one after the other."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "orders.json").write_text(json.dumps({place: order(place) for place in PLACES}))
    command = [sys.executable, str(WORKER), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-800:]
    return {
        place: [torch.load(folder / f"{place} {r}.pt", weights_only=True) for r in range(RANKS)]
        for place in PLACES
    }


@pytest.mark.parametrize("place", PLACES)
def test_two_ranks_compute_what_one_process_does(
    place: str, steps: dict[str, list[dict[str, Any]]]
) -> None:
    """Logits of all samples, and the tables after one step, for every kind of placement."""
    ranks = steps[place]
    net = DenseDlrm(2, (3,), 2, DIM, (3,))
    net.load_state_dict(ranks[0]["dense"])
    tables = [t.clone().requires_grad_() for t in ranks[0]["tables"]]
    for got in ranks:
        bags = [
            F.embedding_bag(index, t, starts, mode="sum")
            for t, (index, starts) in zip(tables, got["lookups"], strict=True)
        ]
        logits = net(got["inputs"], torch.stack(bags, dim=1))
        assert torch.allclose(got["logits"], logits.detach(), atol=1e-6)
        F.binary_cross_entropy_with_logits(logits, got["clicked"]).backward()
    for number, whole in enumerate(tables):
        local = any(s.get("local") for s in PLACES[place][number])
        assert whole.grad is not None
        step = whole.grad / (RANKS if local else 1)  # DDP averages over ranks, shards add
        updated = (whole - LEARNING_RATE * step).detach()
        for got in ranks:
            for s, part in got["shards"]:
                if s["table"] == number:
                    rows = slice(s["first_row"], s["first_row"] + s["rows"])
                    columns = slice(s["first_column"], s["first_column"] + s["columns"])
                    assert torch.allclose(part, updated[rows, columns], atol=1e-6)
