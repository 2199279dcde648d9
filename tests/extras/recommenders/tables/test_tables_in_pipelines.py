"""Spread tables before a pipeline: what its first stage sends, holds and updates, by hand."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from law_case import Knowing, outcome, rank_for
from torch import nn

from itercast.capture.opcall import StepCapture
from itercast.compose.capture_model import capture
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.simulate.memory.stage_memory import stage_memory
from itercast.compose.simulate.rank_program import RankProgram
from itercast.compose.simulate.stage_rank import stage_messages
from itercast.compose.simulate.stages import stages_of

BATCH, BAG, DIM = 8, 3, 16
ROWS = {"bags.0": 100, "bags.1": 60, "items": 40}


class Net(nn.Module):
    """Three tables and a layer of dense features before four blocks; the head reads items again."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom: nn.Module = nn.Linear(5, DIM)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(ROWS[name], DIM, mode="sum") for name in ("bags.0", "bags.1")
        )
        self.items = nn.Embedding(ROWS["items"], DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.top = nn.Linear(DIM, 1)

    def forward(self, dense: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bottom(dense))
        for bag in self.bags:
            x = x + bag(index)
        history = self.items(index).sum(dim=1)
        for block in self.blocks:
            x = torch.relu(block(x))
        loss: torch.Tensor = self.top(x * history).mean()
        return loss


def step() -> StepCapture:
    inputs = (torch.zeros(BATCH, 5), torch.zeros(BATCH, BAG, dtype=torch.int64))
    return capture(Net(), inputs, optimizer="sgd")


def plan(tmp_path: Path, rank_of_items: int = 0) -> str:
    """Two stages of two ranks, of which rank 0 has the bags."""
    ranks = {"bags.0": 0, "bags.1": 0, "items": rank_of_items}
    entries = {name: {"sharding_type": "table_wise", "ranks": [r]} for name, r in ranks.items()}
    (tmp_path / "plan.json").write_text(json.dumps(entries))
    return f"dp=2,pp=2,micro=2,shard={tmp_path / 'plan.json'}"


class Sent(Knowing):
    """Only messages take time, 1 us per KiB."""

    def us(self, family: str, rows: pd.DataFrame) -> Any:
        return rows["message_bytes"] / 1024 if family == "collective" else 0.0


def test_the_first_stage_exchanges_vectors_of_each_micro_batch(tmp_path: Path) -> None:
    """Rank 0 has all tables: of two ranks it gets 2 x 8 lengths and 3 x 24 row numbers each.

    256 and 1152 bytes; it returns 40 vectors of 64 bytes to each, 5120 bytes, and gets as many
    gradients. 512 bytes of the second block's result and as many of items go to the next stage.

     stage 0 |F0 6.375|F1 6.375|B0 5|B1 5| all_reduce of 640 gradients, 2.5
     stage 1           from 7.375 on, no time; gradients are back at 8.375 and 14.75
    """
    rank = rank_for(step(), plan(tmp_path), pricer=Sent)
    calls = rank.model.graph.capture.calls
    found = []
    for stage in stages_of(rank):
        spans = [span for x in stage.layers for span in (x.layer.forward, x.layer.backward)]
        own = [calls[i] for span in spans for i in range(*span) if calls[i].op == COLLECTIVE]
        found.append(sorted((c.phase, c.args[0].nbytes) for c in own))
    forward = [("forward", n) for n in (256, 1152, 5120)]
    assert found == [[("backward", 5120), *forward], []]
    assert [op.duration_us * 1024 for op in stage_messages(rank)[0]] == [1024]
    us = outcome(step(), plan(tmp_path), pricer=Sent).iteration_us
    assert us == pytest.approx(2 * 6.375 + 2 * 5 + 2.5, rel=0.01)


def test_the_first_stage_holds_and_updates_the_tables(tmp_path: Path) -> None:
    """Rank 0 has 160 rows, rank 1 has 40; stages have 5 x 16 + 16 + 2 x 272 and 2 x 272 + 17 more.

    Each micro-batch updates its rows of both bags, the second stage's update is of dense layers.
    """
    rank = rank_for(step(), plan(tmp_path, rank_of_items=1))
    memories = stage_memory(rank, "sgd")
    assert [m["parameters"] for m in memories] == [4 * (160 * DIM + 640), 4 * 561]
    assert memories[0]["temporary"] > memories[1]["temporary"]  # gradients of rows
    updates = [RankProgram(stage).own_update() for stage in stages_of(rank)]
    assert [sum("sparse_update" in p.op for p in own) for own in updates] == [2 * 2, 0]
    assert [sum("foreach" in p.op for p in own) for own in updates] == [1, 1]


def test_stages_multiply_as_much_as_one_process(tmp_path: Path) -> None:
    """Four micro-batches are run in a step, by two replicas."""
    alone, together = (outcome(step(), text).matmul_s for text in ("", plan(tmp_path)))
    assert together * 4 == pytest.approx(4 * alone)


class Late(Net):
    """The bottom is a list of three layers, beside which vectors travel."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom: nn.Module = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, DIM))


def test_the_first_stage_ends_behind_what_reads_the_vectors(tmp_path: Path) -> None:
    """Layer 4 of 9 does, bottom.2: messages, all that takes time, are sent in the first two."""
    inputs = (torch.zeros(BATCH, 5), torch.zeros(BATCH, BAG, dtype=torch.int64))
    found, text = capture(Late(), inputs, optimizer="sgd"), plan(tmp_path)
    first = stages_of(rank_for(found, text, pricer=Sent))[0]
    assert [x.layer.name for x in first.layers] == ["first", "bottom.0", "bottom.1", "bottom.2"]
    refused = {
        text.replace("pp=2", "pp=7"): "7 stages, 5 of 9 layers are left once the first has read",
        text + ",layers=3+6": "reads its tables' vectors in layer 4, it has 3",
    }
    for wrong, told in refused.items():
        with pytest.raises(ValueError, match=told):
            stages_of(rank_for(found, wrong))
