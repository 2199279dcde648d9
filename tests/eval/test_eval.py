"""Results by hand, the report as files, MLflow in a real SQLite store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eval.plots import breakdown, lines, named
from eval.report import write_report
from eval.results import CaseResult, in_words, summary
from eval.tracking import log_evaluation, log_fit

SCORES = {"mape_pct": 5.0, "median_ape_pct": 4.0, "p90_ape_pct": 9.0, "bias_pct": 0.5}
FIT = {
    "gemm": {
        "rows": 100,
        "retest_ape_pct": 3.0,
        "coverage_pct": 81.0,
        "learners": dict.fromkeys(("blend", "nearest", "linear", "roofline"), SCORES),
    }
}


def result(case: str, predicted_us: float, measured_us: float) -> CaseResult:
    return CaseResult(
        case=case,
        plan="",
        model=case,
        ranks=1,
        samples=1,
        predicted_us=predicted_us,
        predicted_us_p10=predicted_us * 0.9,
        predicted_us_p90=predicted_us * 1.1,
        measured_us=measured_us,
        rounds_us=(measured_us,),
        raw_us=measured_us,
        retest_ape_pct=2.0,
        by_family_us={"gemm": predicted_us},
        unmodelled_frac=0.0,
    )


RESULTS = [result("a", 1100, 1000), result("b", 900, 1000), result("c", 1600, 2000)]


def test_a_case_measured_once_has_no_noise_floor() -> None:
    """It is left out of the median, and said where nothing was measured twice."""
    once = replace(RESULTS[0], retest_ape_pct=None)
    assert summary([once, *RESULTS[1:]])["noise_floor_pct"] == 2.0
    assert "noise_floor_pct" not in summary([once])
    assert once.retest_text == "-"
    assert in_words([once]).endswith("nothing was measured twice")


def test_names_in_the_plot_do_not_cover_each_other() -> None:
    """Of two cases beside each other the worse is named; one within 20 % is not."""
    cases = [result("far", 10e3, 20e3), result("near", 700, 1000), result("same", 690, 1000)]
    assert [r.case for r, _ in named([*cases, result("good", 5e4, 5e4)])] == ["far", "same"]


def test_a_long_plan_takes_two_lines_of_a_plot() -> None:
    """What does not fit is cut; bars of cases of one name stand side by side."""
    long = replace(RESULTS[0], case="model", plan="dp=32,pp=8,ep=32,micro=256,zero=1,node=dgx-b200")
    assert lines(long, 24) == "model dp=32, pp=8,\nep=32, micro=256, zero= …"
    assert lines(RESULTS[0], 24) == "a"
    axes = breakdown([long, long]).axes[0]
    assert sorted(bar.get_y() for bar in axes.patches) == [-0.4, 0.6]


def test_every_family_has_a_colour_of_its_own() -> None:
    many = replace(RESULTS[0], by_family_us={f"family {i}": 1.0 for i in range(20)})
    assert len({bar.get_facecolor() for bar in breakdown([many]).axes[0].patches}) == 20


def test_summary_by_hand() -> None:
    found = summary(RESULTS)  # errors +10, -10, -20 %
    assert found["mape_pct"] == pytest.approx(40 / 3)
    assert found["median_ape_pct"] == pytest.approx(10)
    assert found["worst_ape_pct"] == pytest.approx(20)
    assert found["geomean_ape_pct"] == pytest.approx((10 * 10 * 20) ** (1 / 3))
    assert found["bias_pct"] == pytest.approx(-20 / 3)
    with pytest.raises(ValueError, match="no results"):
        summary([])


def test_the_report_is_a_page_and_json(tmp_path: Path) -> None:
    page = write_report(tmp_path / "r", RESULTS, FIT, {"cpu": "<toy>"})
    plain = json.loads((tmp_path / "r" / "evaluation.json").read_text())
    assert [c["case"] for c in plain["cases"]] == ["a", "b", "c"]
    assert {"plan", "predicted_us", "measured_us", "retest_ape_pct"} <= set(plain["cases"][0])
    text = page.read_text()
    assert "&lt;toy&gt;" in text and "data:image/png" in text and "-20.0" in text


def test_runs_stand_side_by_side_in_mlflow(
    mlflow_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an address: in mlflow.db in the working directory."""
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    log_fit(FIT, "toy", Path("bundle"))
    write_report(tmp_path / "demo", RESULTS, FIT, {})
    log_evaluation(RESULTS, tmp_path / "demo")
    client = MlflowClient("sqlite:///mlflow.db")
    fits = client.search_runs([client.get_experiment_by_name("ops/toy").experiment_id])
    nested = [r for r in fits if "mlflow.parentRunId" in r.data.tags]
    assert {r.data.tags["learner"] for r in nested} == {"blend", "nearest", "linear", "roofline"}
    assert nested[0].data.metrics["retest_ape_pct"] == 3.0
    run = client.search_runs([client.get_experiment_by_name("iterations").experiment_id])[0]
    assert run.data.metrics["worst_ape_pct"] == pytest.approx(20)
    assert {f.path for f in client.list_artifacts(run.info.run_id)} >= {"report.html"}
