"""A sweep of the points that a file lists."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.store import read_rows
from itercast.microbench.sweep import scheduler as sweep_module
from itercast.microbench.sweep.captured_points import check_points, read_points, write_points
from itercast.microbench.sweep.collect import collect
from itercast.microbench.sweep.gpu_space import grid, on_gpu
from itercast.microbench.sweep.orders import WorkerOrder

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
