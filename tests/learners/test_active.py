"""Choosing the points of a second sweep, and the file that lists them."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from itercast.learners.active import disagreement, next_pass, point_ids, sampling_keys
from itercast.learners.models.training_table import Table
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.store import read_rows, write_atomic, write_part
from itercast.microbench.sweep import scheduler as sweep_module
from itercast.microbench.sweep.captured_points import (
    check_points,
    points_path,
    read_points,
    write_points,
)
from itercast.microbench.sweep.collect import collect
from itercast.microbench.sweep.gpu_space import grid, on_gpu
from itercast.microbench.sweep.orders import WorkerOrder

H100 = load_gpu("h100-sxm-80gb")
COST_S = 0.03


def norms(count: int, seed: int = 0) -> list[Any]:
    return list(islice(on_gpu("norm", grid("norm", seed), H100, seed), count))


@pytest.fixture
def first_pass(tmp_path: Path) -> Path:
    """Sixty points of one family on an H100, 30 ms each."""
    common = {"family": "norm", "gpu": H100.name, "threads": 0, "cache": "warm", "status": "ok"}
    rows = [
        {**common, **asdict(p), "time_us": 3.0 + 1e-3 * n, "cost_s": COST_S, "repeat": 0}
        for n, p in enumerate(norms(60))
    ]
    write_part(tmp_path, "norm", H100.name, pd.DataFrame(rows), "one")
    for seed in (1, 2):  # no points of captured models: capturing them takes half a minute
        write_atomic(points_path(tmp_path, "cuda", seed), b"{}")
    return tmp_path


def test_draws_are_as_likely_as_scores_are_large() -> None:
    first = [int(np.argmax(sampling_keys(np.array([3.0, 1.0, 0.0]), seed))) for seed in range(400)]
    assert first.count(0) == pytest.approx(300, abs=40)  # 3 / (3 + 1)
    assert 2 not in first


def test_models_disagree_where_few_points_speak() -> None:
    """Flat and dense on the left; on the right steep and thin."""
    left, right = np.linspace(0, 0.5, 80), np.linspace(0.55, 1, 8)
    x = np.concatenate([left, right, left + 0.001, right + 0.02])[:, None].astype(np.float32)
    time_us = np.where(x[:, 0] < 0.52, 1.0, np.exp(8 * x[:, 0]))
    group, one = np.arange(len(x)), np.ones(len(x))
    table = Table(x=x, roofline_us=one, time_us=time_us, group=group)
    found = disagreement(table, np.arange(88), np.arange(88, 176))
    assert found.spread[80:].mean() > 5 * found.spread[:70].mean()
    assert 0 <= found.error < 0.1  # of the median shape, and most are flat


def test_a_point_is_its_shape_dtype_and_threads() -> None:
    rows = pd.DataFrame({"dtype": ["a", "a", "b", "a"], "threads": [1, 1, 1, 2]})
    ids = point_ids(rows.assign(cache=["warm", "cold"] * 2), np.zeros(4))
    assert len(set(ids)) == 3 and ids[0] == ids[1]


def test_a_pass_fills_its_budget_with_new_points(
    first_pass: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.9 s at 30 ms a point are thirty."""
    monkeypatch.setattr("itercast.learners.active.CANDIDATES", 400)
    found = next_pass([first_pass], H100.name, None, 0.9, seed=1)
    assert set(found) == {"norm"}
    assert len(found["norm"]) == len(set(found["norm"])) == pytest.approx(30, abs=1)
    assert not set(found["norm"]) & set(norms(60))
    other = next_pass([first_pass], H100.name, ["norm"], 0.9, seed=2)
    assert other["norm"] != found["norm"]
    with pytest.raises(ValueError, match="gpu 't4': no rows of a sweep"):
        next_pass([first_pass], "t4", None, 0.9, seed=1)


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


def test_a_second_pass_on_this_cpu(tmp_path: Path) -> None:
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
