"""`itercast check`, `compare` and `calibrate --host`: bundles and hosts against measured rows."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import yaml
from toy_products import TOY, products, write_rows
from typed_commands import typed
from typer.testing import CliRunner

from itercast.capture.base.files import write_atomic
from itercast.command_line import app
from itercast.extras.calibration.few_rows import calibrate_bundle
from itercast.extras.drift.bundles import compare_bundles
from itercast.learners.bundle import SHIPPED_CPU, Bundle
from itercast.learners.held_out import save_held_out
from itercast.microbench.hardware.host import load_host
from itercast.microbench.store import read_rows, write_part

DATASETS = Path(__file__).parents[3] / "datasets"
CPU = "intel-xeon-2.50ghz-2c"
FAMILIES = ("gemm", "norm", "elementwise")


def root_of(
    folder: Path, slower: Mapping[str, float] | None = None, torch: str = "2.13.0+cpu"
) -> Path:
    """The shipped CPU bundle's own rows of three families, with times and anchors multiplied."""
    slower = slower or {}
    for family in FAMILIES:
        rows = read_rows([DATASETS], family)
        time_us = rows["time_us"] * slower.get(family, 1.0)
        anchors = {a: rows[a] * slower.get("machine", 1.0) for a in ("anchor_us", "serial_us")}
        write_part(folder, family, CPU, rows.assign(time_us=time_us, **anchors), "one")
        card = yaml.safe_load(next((DATASETS / family / CPU).glob("*/card.yaml")).read_text())
        card["versions"]["torch"] = torch
        path = folder / family / CPU / "itercast" / "card.yaml"
        write_atomic(path, yaml.safe_dump(card).encode())
    return folder


def run(*args: str) -> tuple[int, str]:
    """Exit code and output of a check against the shipped CPU bundle."""
    found = CliRunner().invoke(app, ["check", "--bundle", str(SHIPPED_CPU), *args])
    return found.exit_code, found.output


def test_rows_that_the_bundle_was_trained_on_fit_it(tmp_path: Path) -> None:
    code, out = run("--measured", str(root_of(tmp_path)), "--json")
    found = json.loads(out)
    assert (code, found["fits"]) == (0, True)
    assert found["verdict"].startswith(f"The bundle fits {CPU}: 3 families agree")
    assert {f["family"]: f["drifted"] for f in found["families"]} == dict.fromkeys(FAMILIES, False)
    assert found["slowdown"] == pytest.approx(1.0, abs=0.02)


def test_a_bundle_whose_gemm_is_twice_too_slow_is_refused(tmp_path: Path) -> None:
    """Products now take half of what it was trained on; other families are as they were."""
    code, out = run("--measured", str(root_of(tmp_path, {"gemm": 0.5})), "--json")
    found = json.loads(out)
    assert (code, found["fits"]) == (1, False)
    drifted = {f["family"]: f["ratio"] for f in found["families"] if f["drifted"]}
    assert drifted == {"gemm": pytest.approx(0.5, rel=0.1)}
    assert f"does not fit {CPU}: measured times over forecasts are gemm 0.5" in found["verdict"]


def test_a_slower_machine_is_told_apart_from_slower_families(tmp_path: Path) -> None:
    """Everything takes 1.2 times as long, the reference tasks as well: speed, not drift."""
    slower = dict.fromkeys((*FAMILIES, "machine"), 1.2)
    code, out = run("--measured", str(root_of(tmp_path, slower)), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["slowdown"] == pytest.approx(1.2, abs=0.03)
    pct = 100 * (found["slowdown"] - 1)
    assert f"the machine is {pct:.0f} % slower overall" in found["verdict"]


def test_a_machine_too_slow_to_compare_does_not_fit(tmp_path: Path) -> None:
    """Rows beside reference tasks of more than three times their time are not corrected."""
    slower = dict.fromkeys((*FAMILIES, "machine"), 5.0)
    code, out = run("--measured", str(root_of(tmp_path, slower)))
    assert code == 1
    assert "reference tasks take 4.9 times as long as at training" in " ".join(out.split())


def test_what_changed_since_training_is_listed(tmp_path: Path) -> None:
    _, out = run("--measured", str(root_of(tmp_path, torch="2.14.0+cpu")))
    line = next(line for line in out.splitlines() if "torch" in line)
    assert [cell.strip() for cell in line.split("│")[1:-1]] == ["torch", "2.13.0+cpu", "2.14.0+cpu"]


def test_too_few_rows_say_so(tmp_path: Path) -> None:
    root_of(tmp_path)
    for path in tmp_path.rglob("part-*.parquet"):
        rows = read_rows([tmp_path], path.parts[-4]).head(6)
        path.unlink()
        write_part(tmp_path, path.parts[-4], CPU, rows, "few")
    code, out = run("--measured", str(tmp_path))
    assert code == 2
    assert "no family has enough points to be judged" in out


@pytest.mark.slow
def test_this_cpu_is_measured_and_judged(tmp_path: Path) -> None:
    """Whatever the verdict on a noisy machine: points of most families, a verdict, its code."""
    found = CliRunner().invoke(app, ["check", "--budget", "30s", "--json"])
    assert found.exit_code in (0, 1)
    told = json.loads(found.stdout)
    assert told["fits"] == (found.exit_code == 0)
    assert told["rows"] > 20
    assert {"gemm", "norm", "elementwise"} <= {f["family"] for f in told["families"]}
    assert all(f["ratio_p10"] <= f["ratio"] <= f["ratio_p90"] for f in told["families"])


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


def compare(*words: str | Path) -> str:
    return typed("compare", *words).stdout


def test_held_out_points_decide_beyond_the_noise(tmp_path: Path, mlflow_store: str) -> None:
    ten, five = bundle(tmp_path / "ten", 0.10), bundle(tmp_path / "five", 0.05)
    (found,) = json.loads(compare(ten, five, "--json"))
    assert found["points"] == 40 and found["better"] == 2
    assert found["errors_pct"] == pytest.approx([10, 5], abs=0.1)
    low, high = found["difference_pct"]
    assert low < -5 < high < 0
    assert json.loads(compare(five, ten, "--json"))[0]["better"] == 1
    (same,) = json.loads(compare(ten, ten, "--json"))
    assert same["better"] == 0
    few = bundle(tmp_path / "few", 0.05, points=8)  # 8 points in common are too few
    (unsure,) = json.loads(compare(ten, few, "--json"), parse_constant=pytest.fail)
    assert (unsure["better"], unsure["difference_pct"]) == (0, None)
    assert "too few points" in compare(ten, few)
    out = compare(ten, five)
    assert "gemm" in out and f"{five} is better in 1 of 1: gemm" in out.replace("\n", "")
    client = mlflow.MlflowClient(mlflow_store)
    place = client.get_experiment_by_name("compared").experiment_id
    logged = client.search_runs([place], "attributes.run_name = 'ten against five'")[0].data.metrics
    assert logged["gemm/cpu/1st"] == pytest.approx(10, abs=0.1)
    assert (logged["1st_better"], logged["2nd_better"]) == (0, 1)


def test_rows_and_iterations_of_a_dataset_decide(tmp_path: Path) -> None:
    """A bundle without products and one that knows them: both price the rows that are given."""
    root = tmp_path / "rows"
    write_part(root, "norm", CPU, read_rows([DATASETS], "norm").iloc[::2], "half")
    shutil.copy(
        next((DATASETS / "norm" / CPU).glob("*/card.yaml")), root / "norm" / CPU / "itercast"
    )
    steps = read_rows([DATASETS], "iteration")
    place = root / "iteration/cpu/some"
    place.mkdir(parents=True)
    steps[steps["case"].isin(["gnn-s", "gnn-m"])].to_parquet(place / "part-some.parquet")
    known = Bundle.load(SHIPPED_CPU)
    slow = tmp_path / "slow"
    norm = known.models["norm"]
    Bundle(models={"norm": norm}, gpus=known.gpus, anchors=known.anchors).save(slow)
    rows, whole = json.loads(compare(slow, SHIPPED_CPU, "--data", root, "--json"))
    assert (rows["family"], rows["better"]) == ("norm", 0)  # the same model
    assert rows["errors_pct"][0] == rows["errors_pct"][1]
    assert (whole["family"], whole["points"]) == ("whole iterations", 2)
    assert whole["errors_pct"][0] > 2 * whole["errors_pct"][1]  # products by their roofline alone


def test_rows_that_a_bundle_was_trained_on_are_left_out(
    learned: Path, tmp_path: Path, mlflow_store: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 240 products it has seen 160; of the same on another GPU none; of its own rows all."""
    bundle, root = learned / "bundle", tmp_path / "rows"
    rows = products(240)
    write_rows(root, rows)
    write_rows(root, rows.assign(gpu="other"), replace(TOY, name="other"), part="other")
    typed("compare", str(bundle), str(bundle), "--data", str(root))
    line = "gemm: 160 of 480 rows are left out, of shapes that a bundle was trained on"
    assert line in caplog.messages
    only = ["compare", str(bundle), str(SHIPPED_CPU), "--data", str(learned)]
    none = typed(*only, rc=2)
    assert "nothing to compare in" in none.stderr


def test_rows_that_calibrated_a_bundle_are_left_out(
    learned: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 80 new products 30 calibrate it."""
    known, new = Bundle.load(learned / "bundle"), products(240).tail(80).reset_index(drop=True)
    calibrate_bundle(known, new.head(30)).save(tmp_path / "calibrated")
    write_rows(tmp_path / "rows", new)
    (found,) = compare_bundles(tmp_path / "calibrated", learned / "bundle", [tmp_path / "rows"])
    assert found.points == 50 and caplog.messages[-1].startswith("gemm: 30 of 80 rows are left out")


def test_of_older_bundles_the_very_same_rows_are_known(tmp_path: Path) -> None:
    """The shipped bundle keeps no shapes: its own rows are nothing to compare on."""
    words = ["compare", str(SHIPPED_CPU), str(SHIPPED_CPU), "--data"]
    shutil.copytree(DATASETS / "norm", tmp_path / "norm")
    done = typed(*words, str(tmp_path), rc=2)
    assert "nothing to compare in" in done.stderr


runner = CliRunner()
MODEL = ("gpt-s", "--gpu", "h100-sxm-80gb", "--dtype", "bf16", "--batch", "1")


def predicted(host: str) -> dict[str, Any]:
    done = runner.invoke(app, ["predict", *MODEL, "--host", host, "--json"], catch_exceptions=False)
    found: dict[str, Any] = json.loads(done.output)
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """An iteration as slow as on the host of DGX A100."""
    facts = {"family": "iteration", "status": "ok", "case": "gpt-s", "batch": 1, "seq": 64}
    how = {"gpu": "h100-sxm-80gb", "optimizer": "adamw", "dtype": "bf16"}
    time_us = predicted("dgx-a100")["iteration_us"]
    path = tmp_path / "rows.parquet"
    pd.DataFrame([{**facts, **how, "time_us": time_us}]).to_parquet(path)
    return path


def test_the_host_of_measured_iterations_is_written_and_used(tmp_path: Path, rows: Path) -> None:
    mine = tmp_path / "mine.yaml"
    typed("calibrate", rows, "--host", mine)
    assert load_host(str(mine)).slowdown == pytest.approx(load_host("dgx-a100").slowdown, rel=0.05)
    found, usual = predicted(str(mine)), predicted("usual")
    assert found["host"] == "mine"
    assert usual["host"] == "usual"
    assert found["iteration_us"] == pytest.approx(predicted("dgx-a100")["iteration_us"], rel=0.05)
    assert found["iteration_us"] > usual["iteration_us"]
    assert found["assumed_frac"] < usual["assumed_frac"]  # a named host is known
    both = pd.concat([pd.read_parquet(rows).assign(gpu=gpu) for gpu in ("h100-sxm-80gb", "a10")])
    both.to_parquet(rows)
    refused = typed("calibrate", str(rows), "--host", str(mine), rc=2)
    assert "a host is beside GPUs of one kind, got rows of a10, h100-sxm-80gb" in refused.stderr
