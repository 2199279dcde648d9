"""`itercast check`: rows that fit a bundle, rows that do not, and a real measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from itercast.__main__ import app
from itercast.learners.bundle import SHIPPED_CPU
from itercast.microbench.store import read_rows, write_atomic, write_part

DATASETS = Path(__file__).parents[2] / "datasets"
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


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for args, words in (
        (["--device", "tpu"], "device 'tpu': allowed are cpu and cuda"),
        (["--budget", "soon"], "budget 'soon'"),
        (["--measured", str(tmp_path)], "rows of one device are judged, got []"),
    ):
        code, out = run(*args)
        assert code == 2
        assert words in out


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
    assert told["rows"] > 50
    assert {"gemm", "norm", "elementwise"} <= {f["family"] for f in told["families"]}
    assert all(f["ratio_p10"] <= f["ratio"] <= f["ratio_p90"] for f in told["families"])
