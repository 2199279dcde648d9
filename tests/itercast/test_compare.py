"""``itercast compare`` says which of two bundles forecasts better, beyond the noise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from itercast.__main__ import app
from itercast.learners.bundle import SHIPPED_CPU, Bundle
from itercast.learners.held_out import save_held_out
from itercast.microbench.store import read_rows

DATASETS = Path(__file__).parents[2] / "datasets"


def bundle(folder: Path, error: float, points: int = 40) -> Path:
    """A bundle whose forecasts of held-out products are too long by ``error``, give or take 1 %."""
    spread = 1 + 0.01 * np.linspace(-1, 1, points)
    rows = pd.DataFrame(
        {
            "family": "gemm",
            "op": "mm",
            "gpu": "cpu",
            "dtype": "fp32",
            "params": [f"m={i}" for i in range(points)],
            "measured_us": 100.0,
            "predicted_us": 100.0 * (1 + error) * spread,
            "retest_pct": 1.0,
        }
    )
    Bundle(models={}, gpus={}).save(folder)
    save_held_out(folder, rows)
    return folder


def compare(*words: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["compare", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


def test_held_out_points_decide_beyond_the_noise(tmp_path: Path, mlflow_store: str) -> None:
    ten, five = bundle(tmp_path / "ten", 0.10), bundle(tmp_path / "five", 0.05)
    (found,) = json.loads(compare(ten, five, "--json")[1])
    assert found["points"] == 40 and found["better"] == 2
    assert found["errors_pct"] == pytest.approx([10, 5], abs=0.1)
    low, high = found["difference_pct"]
    assert low < -5 < high < 0
    assert json.loads(compare(five, ten, "--json")[1])[0]["better"] == 1
    (same,) = json.loads(compare(ten, ten, "--json")[1])
    assert same["better"] == 0
    few = bundle(tmp_path / "few", 0.05, points=8)  # 8 points in common are too few
    assert json.loads(compare(ten, few, "--json")[1])[0]["better"] == 0
    out = compare(ten, five)[1]
    assert "gemm" in out and f"{five} is better in 1 of 1: gemm" in out.replace("\n", "")
    client = mlflow.MlflowClient(mlflow_store)
    place = client.get_experiment_by_name("compared").experiment_id
    logged = client.search_runs([place], "attributes.run_name = 'ten against five'")[0].data.metrics
    assert logged["gemm/cpu/1st"] == pytest.approx(10, abs=0.1)
    assert (logged["1st_better"], logged["2nd_better"]) == (0, 1)


def test_rows_and_iterations_of_a_dataset_decide(tmp_path: Path) -> None:
    """A bundle without products and one that knows them: both price the rows that are given."""
    root = tmp_path / "rows"
    shutil.copytree(DATASETS / "norm", root / "norm")
    steps = read_rows([DATASETS], "iteration")
    place = root / "iteration/cpu/some"
    place.mkdir(parents=True)
    steps[steps["case"].isin(["gnn-s", "gnn-m"])].to_parquet(place / "part-some.parquet")
    known = Bundle.load(SHIPPED_CPU)
    slow = tmp_path / "slow"
    norm = known.models["norm"]
    Bundle(models={"norm": norm}, gpus=known.gpus, anchors=known.anchors).save(slow)
    code, out, said = compare(slow, SHIPPED_CPU, "--data", root, "--json")
    assert code == 0, said
    rows, whole = json.loads(out)
    assert (rows["family"], rows["better"]) == ("norm", 0)  # the same model
    assert rows["errors_pct"][0] == rows["errors_pct"][1]
    assert (whole["family"], whole["points"]) == ("whole iterations", 2)
    assert whole["errors_pct"][0] > 2 * whole["errors_pct"][1]  # products by their roofline alone


def test_refusals_are_one_line_and_code_2(tmp_path: Path) -> None:
    one = bundle(tmp_path / "one", 0.1)
    code, _, said = compare(one, SHIPPED_CPU)
    assert code == 2 and said.endswith("keeps no held-out rows; name measured rows with --data\n")
    code, _, said = compare(one, one, "--data", tmp_path / "none")
    assert code == 2 and "none': no such folder" in said
