"""Points that sweeps measure: captured ones, those of a file, and their order."""

import os
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from itercast.microbench.hardware.machine import slow_dtypes
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.matrix.gemm import FAMILY as GEMM
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.memory.elementwise import Elementwise
from itercast.microbench.store import read_rows
from itercast.microbench.sweep import scheduler as sweep_module
from itercast.microbench.sweep.captured_points import (
    ModelCaptures,
    alternate,
    by_turns,
    capture_seconds,
    check_points,
    points_path,
    read_points,
    write_points,
)
from itercast.microbench.sweep.collect import collect
from itercast.microbench.sweep.gpu_space import grid, on_gpu
from itercast.microbench.sweep.orders import WorkerOrder
from itercast.microbench.sweep.random_models import ORDER, random_model


def points(op: str, count: int) -> list[Elementwise]:
    return [Elementwise(op=op, numel=n + 1) for n in range(count)]


def test_rare_kinds_come_soon_and_common_ones_more_often() -> None:
    """16 sums take turns at 1/8, 3/8, 5/8, ...; one tanh at 1/2; four products at 1/4, 3/4, ..."""
    found = by_turns(points("add", 16) + points("tanh", 1) + points("mul", 4), seed=0)
    assert [p.op for p in found[:6]] == ["add", "mul", "add", "tanh", "add", "mul"]
    assert len(set(found)) == 21


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
    again.done = len(ORDER)  # one of each kind: families that none of them calls get no more
    assert again.due(1.0, ["gemm"]) and not again.due(1.0, ["collective"])


H100 = load_gpu("h100-sxm-80gb")


def norms(count: int) -> list[Any]:
    return list(islice(on_gpu("norm", grid("norm", 0), H100, 0), count))


def test_a_worker_measures_the_points_of_the_file_alone(tmp_path: Path) -> None:
    wanted, points = tmp_path / "wanted.json", norms(12)
    write_points(wanted, {"norm": points})
    assert check_points(wanted) == 12 and read_points(wanted, "norm") == points
    order = WorkerOrder(
        root=str(tmp_path),
        run_id="run",
        device="cuda",
        gpu=H100.name,
        families=("gemm", "norm"),
        threads=0,
        budget_s=60.0,
        seed=0,
        ranks=1,
        hardware=H100.to_dict(),
        points=str(wanted),
        only=True,
    )
    sweep = sweep_module.Sweep(order, set())
    chosen = [sweep.choose(0.0) for _ in range(13)]
    assert [c[1] for c in chosen if c is not None] == points
    sweep = sweep_module.Sweep(replace(order, only=False, points=str(tmp_path / "no")), set())
    assert next(sweep.streams["norm"]) == norms(1)[0]


def test_points_of_a_file_on_this_cpu(tmp_path: Path) -> None:
    wanted = tmp_path / "wanted.json"
    points = [replace(p, rows=3 + 2 * n, cols=64, dtype="fp32") for n, p in enumerate(norms(2))]
    write_points(wanted, {"norm": points})
    assert collect(tmp_path / "out", "cpu", ["norm"], 2.0, wanted=wanted) > 0
    rows = read_rows([tmp_path / "out"], "norm")
    assert set(rows["rows"]) <= {3, 5} and set(rows["cols"]) == {64}


@pytest.mark.parametrize("text", ["{", "[1]", '{"gem": [{}]}', '{"norm": [{"n": 1}]}'])
def test_what_is_no_file_of_points_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "points.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a file of points"):
        collect(tmp_path / "out", "cpu", ["norm"], 1.0, wanted=path)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_random_models_of_all_kinds_can_be_made(device: str) -> None:
    """Four times each kind; no memory is taken for their parameters. Some have dropout."""
    rng, with_dropout = np.random.default_rng(3), set[bool]()
    for number in range(4 * len(ORDER)):
        model = random_model(rng, number, device)
        with torch.device("meta"):
            built = model.build()
            assert list(built.parameters())
            assert model.inputs(model.batch, model.seq)
        if ORDER[number % len(ORDER)] == "transformer":
            with_dropout.add(any(isinstance(m, torch.nn.Dropout) for m in built.modules()))
    assert with_dropout == {False, True}


def test_depthwise_convolutions_in_one_dimension_are_swept() -> None:
    """One of 16 points, as in Mamba; each channel is a group."""
    points = list(islice(families()["conv"].sweep(), 200))
    found = [p for p in points if p.h == p.kernel_h == 1 < p.groups]
    assert 4 <= len(found) <= 24 and all(p.groups == p.in_channels for p in found)


def test_long_products_in_16_bits_are_left_out_of_slow_cpus() -> None:
    """At 1 GFLOP/s a product of 2.1 GFLOPs takes two seconds, eight times over."""
    sides = {"fp32": 1024, "bf16": 1024, "fp16": 256}
    points = [Gemm(m=n, n=n, k=n, dtype=dtype) for dtype, n in sides.items()]
    fast = "bf16" not in slow_dtypes()
    found = list(sweep_module._quick(GEMM, iter(points)))
    assert found == [p for p in points if fast or p.dtype != "bf16"]
