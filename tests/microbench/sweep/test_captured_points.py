"""The order of captured points."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from itercast.microbench.cases.models.convnets import DenseBlock, NextBlock
from itercast.microbench.cases.models.graph import GraphAttention
from itercast.microbench.ops.memory.elementwise import Elementwise
from itercast.microbench.sweep.captured_points import (
    LARGEST,
    MODELS,
    ModelCaptures,
    alternate,
    by_turns,
    capture_seconds,
    points_path,
    write_points,
)


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


def test_points_of_models_captured_meanwhile_are_mixed_in(tmp_path: Path) -> None:
    """Nothing is captured yet: points of the sweep; then two captured ones, and newer ones too."""
    path = tmp_path / "points.json"
    stream = alternate(path, "elementwise", iter(points("mul", 9)), 0)
    assert [next(stream).op, next(stream).op] == ["mul", "mul"]
    write_points(path, {"elementwise": points("add", 3)})
    assert [next(stream).op for _ in range(3)] == ["add", "add", "mul"]
    write_points(path, {"elementwise": points("add", 3) + points("tanh", 1)})
    os.utime(path, ns=(1, 1))  # a clock may not tell two writes apart
    rest = [p.op for p in stream]
    assert Counter(rest) == {"add": 1, "tanh": 1, "mul": 6} and "tanh" in rest[:2]


def test_captures_go_on_where_a_killed_sweep_left_them(tmp_path: Path) -> None:
    """A quarter of the time is for captures: 2 s of them are due again after 8 s."""
    path = points_path(tmp_path, "cpu", 0)
    first = ModelCaptures(path, "cpu", 0)
    assert first.due(0.1, ["gemm"]) and not first.due(0.0, ["gemm"])
    first.capture_next()
    first.taken_s = 2.0
    assert not first.due(8.0, ["gemm"]) and first.due(8.1, ["gemm"])
    again = ModelCaptures(path, "cpu", 0)
    assert again.done == 1 and again.points == first.points and again.points["gemm"]
    assert capture_seconds(path) == pytest.approx(first.seconds, abs=1e-3)
    again.done = len(MODELS)  # one of each kind: families that none of them calls get no more
    assert again.due(1.0, ["gemm"]) and not again.due(1.0, ["collective"])


def test_random_models_have_depthwise_convolutions_lstms_and_graph_attention() -> None:
    rng = np.random.default_rng(0)
    drawn = [kind(rng, LARGEST["cpu"]).build() for kind in MODELS for _ in range(8)]
    layers = [layer for model in drawn for layer in model.modules()]
    assert any(isinstance(m, nn.Conv2d) and m.groups == m.in_channels > 1 for m in layers)
    assert {nn.LSTM, nn.GRU, GraphAttention, DenseBlock, NextBlock} <= {type(m) for m in layers}
