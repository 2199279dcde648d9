"""The order of captured points."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
from torch import nn

from itercast.microbench.cases.models.convnets import DenseBlock, NextBlock
from itercast.microbench.cases.models.graph import GraphAttention
from itercast.microbench.ops.memory.elementwise import Elementwise
from itercast.microbench.sweep.captured_points import LARGEST, MODELS, alternate, by_turns


def points(op: str, count: int) -> list[Elementwise]:
    return [Elementwise(op=op, numel=n + 1) for n in range(count)]


def test_rare_kinds_come_soon_and_common_ones_more_often() -> None:
    """16 sums take turns at 1/8, 3/8, 5/8, ...; one tanh at 1/2; four products at 1/4, 3/4, ..."""
    found = by_turns(points("add", 16) + points("tanh", 1) + points("mul", 4), seed=0)
    assert [p.op for p in found[:6]] == ["add", "mul", "add", "tanh", "add", "mul"]
    assert len(set(found)) == 21


def test_two_captured_points_then_one_swept(tmp_path: Path) -> None:
    captured = tmp_path / "points.json"
    captured.write_text(json.dumps({"elementwise": [asdict(p) for p in points("add", 5)]}))
    found = list(islice(alternate(captured, "elementwise", iter(points("mul", 3)), 0), 8))
    assert [p.op for p in found] == ["add", "add", "mul", "add", "add", "mul", "add", "mul"]


def test_random_models_have_depthwise_convolutions_lstms_and_graph_attention() -> None:
    rng = np.random.default_rng(0)
    drawn = [kind(rng, LARGEST["cpu"]).build() for kind in MODELS for _ in range(8)]
    layers = [layer for model in drawn for layer in model.modules()]
    assert any(isinstance(m, nn.Conv2d) and m.groups == m.in_channels > 1 for m in layers)
    assert {nn.LSTM, nn.GRU, GraphAttention, DenseBlock, NextBlock} <= {type(m) for m in layers}
