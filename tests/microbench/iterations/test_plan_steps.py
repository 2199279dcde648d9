"""Steps under plans and sharded DLRMs: what cannot run, what stays equal, all on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from itercast.capture.cases.models.dlrm import DenseDlrm
from itercast.capture.cases.registry import case
from itercast.capture.step import StepSettings
from itercast.microbench.iterations.collect import collect_iterations
from itercast.microbench.iterations.measure import Iteration
from itercast.microbench.iterations.measured_plan import measurable
from itercast.microbench.iterations.plan_stages import edges, own_parameters
from itercast.microbench.iterations.plan_steps import make_plan_step, numbered_layers
from itercast.microbench.iterations.sharded_dlrm import LEARNING_RATE
from itercast.microbench.store import read_rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2,tp=2", "allowed: dp beside tp with zero"),
        ("dp=2,gossip=ring", "plan 'dp=2,gossip=ring' cannot be measured; allowed: known keys"),
        ("pp=2,dp=2,zero=2", "allowed: pp without zero"),
        ("dp=2,cdp=1,compress=0.5", "compress acts on all_reduce: no cdp"),
        ("dp=4,hsdp=2,zero=2,local=4", "allowed: local with dp alone"),
    ],
)
def test_a_plan_that_cannot_be_run_names_the_rule(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measurable(text)


def gradients(plan: str, dtype: str = "fp32") -> torch.Tensor:
    """Gradients of a small GPT, one after the other, of a step from the same seed."""
    kept: list[torch.Tensor] = []
    chosen = case("gpt-s")
    model = chosen.build

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        made: torch.nn.Module = model()
        kept.extend(made.parameters())
        torch.manual_seed(1)
        return made

    from dataclasses import replace

    own = replace(chosen, build=build)
    settings = StepSettings(dtype=dtype)
    make_plan_step(own, plan, 2, 16, settings, "cpu", lambda name: None).run()
    return torch.cat([p.grad.reshape(-1) for p in kept if p.grad is not None])


def test_recomputing_changes_nothing_but_time() -> None:
    torch.testing.assert_close(gradients("recompute=full"), gradients(""))


def test_a_plan_runs_in_the_dtype_asked_for() -> None:
    assert gradients("accumulate=2", "bf16").dtype == torch.bfloat16


def test_gradients_of_micro_batches_add_up() -> None:
    """The loss is a mean per micro-batch: two of them give a gradient about twice as large."""
    both, whole = gradients("accumulate=2"), gradients("")
    cosine = torch.nn.functional.cosine_similarity(both, whole, dim=0)
    assert cosine > 0.5
    assert 1 < both.norm() / whole.norm() < 3


def test_stages_share_blocks_and_parameters() -> None:
    """Five blocks in two stages: three and two; the tied table is at both ends."""
    assert edges(5, 2) == [0, 3, 5]
    with pytest.raises(ValueError, match="4 stages, the model has 2 blocks"):
        edges(2, 4)
    model = case("gpt-s").build()
    first, last = own_parameters(model, 0, 1), own_parameters(model, 1, 2)
    shared = {id(p) for p in first} & {id(p) for p in last}
    assert shared == {id(model.head.weight)}
    assert {id(p) for p in (*first, *last)} == {id(p) for p in model.parameters()}
    assert numbered_layers(model) == list(model.blocks)


@pytest.mark.slow
def test_every_kind_of_plan_runs_on_two_processes_once_each_round(tmp_path: Path) -> None:
    """Two processes have half of the threads each."""
    plans = ["dp=2", "dp=2,zero=3", "dp=2,zero=1,accumulate=2", "dp=2,compress=0.5", "tp=2"]
    plans += ["pp=2,micro=2", "dp=2,cdp=1", "dp=2,local=3", "dp=2,local=2,outer"]
    wanted = [Iteration(case="gpt-s", batch=2, seq=16, plan=plan) for plan in ["", *plans]]
    assert collect_iterations(tmp_path, "cpu", wanted, 0) == len(wanted)
    assert collect_iterations(tmp_path, "cpu", wanted, 0) == 0  # they are there
    assert collect_iterations(tmp_path, "cpu", wanted[:1], 1) == 1
    rows = read_rows([tmp_path], "iteration")
    assert sorted(rows["plan"]) == ["", "", *sorted(plans)]
    cores = os.cpu_count() or 1
    assert set(rows[rows["plan"] == ""]["threads"]) == {cores}
    assert set(rows[rows["plan"] != ""]["threads"]) == {max(1, cores // 2)}
    assert (rows["status"] == "ok").all() and (rows["time_us"] > 0).all()


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
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={RANKS}", str(WORKER), str(folder)]
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
