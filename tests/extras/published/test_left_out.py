"""Leave one source out: what is left out of what, by sources made up by hand."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typed_commands import typed

from itercast.capture.base.assumptions import Assumption
from itercast.extras.published.left_out import (
    check_source,
    compared,
    fitted_sources,
    left_out_markdown,
    still_fitted,
)
from itercast.extras.published.left_out_models import (
    quick_model_with_intervals,
    run_models_left_out,
    without_forecasts,
)
from itercast.extras.published.left_out_ops import (
    NAME,
    PUBLISHER,
    op_sources,
    read_ops,
    run_left_out,
    splits,
)
from itercast.extras.published.lines import LineResult, ModelLine
from itercast.extras.published.models import ForecastLine
from itercast.extras.published.report import line_names, report
from itercast.learners.bundle import SHIPPED
from itercast.learners.family_model import prepare
from itercast.learners.intervals import log_error
from itercast.learners.models.trees import default_options
from itercast.learners.train import hardware_of
from itercast.learners.training_rows import usable_rows
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops import families

DATASETS = Path(__file__).parents[3] / "datasets"

LINE = ModelLine(name="x", targets={"mape_pct": 5.0})


def entry(name: str, without: object, *sources: str) -> Assumption:
    return Assumption(
        module="host",
        name=name,
        value=4.0,
        unit="us",
        source="a test",
        holds="here",
        fitted_on=sources,
        without=without,
    )


SIZES = range(2048, 8193, 512)


def two_sources(public: Path) -> Path:
    """Products in fp8 on an H100: DeepGEMM's reach 0.6 of the peak, PipeWeave's 0.3."""
    peak, shapes = load_gpu("h100-sxm-80gb").peak("fp8"), list(product(SIZES, SIZES))
    rate = f"{0.6 * peak / 1e12:.3f} TFLOPS,Normal GEMMs,,,NVIDIA H100 80GB HBM3\n"
    theirs = "".join(f"{m},{n},4096,{rate}" for m, n in shapes)
    others = "".join(
        f"{m},{n},4096,{2e6 * m * n * 4096 / 0.3 / peak:.3f},H100\n" for m, n in shapes
    )
    for place, text in (
        ("deepgemm/gemm.csv", f"M,N,K,Computation,table,#Groups,M per group,gpu\n{theirs}"),
        ("pipeweave/dataset/gemm_fp8_test.csv", f"M,N,K,avg_duration,hardware\n{others}"),
    ):
        (public / place).parent.mkdir(parents=True)
        (public / place).write_text(text)
    return public


def test_an_assumption_that_keeps_its_value_is_named() -> None:
    known = [entry("a", 1.0, "Timm"), entry("b", None, "timm"), entry("c", None), entry("d", 0.0)]
    assert still_fitted("timm", known) == ["host.b"]
    assert still_fitted("vidur", known) == []
    assert {"timm", "kernelbench"} <= fitted_sources(known)  # hosts were fitted on KernelBench


def test_errors_without_stand_beside_those_with() -> None:
    """Forecasts of 15 and 12 us for 10 us: 50 and 20 % too slow; what stays fitted is said."""
    covered = ({"coverage_pct": 50.0}, {"coverage_pct": 100.0})
    times_us = (np.full(2, 10.0), np.full(2, 15.0), np.full(2, 12.0))
    result = compared("x", "timm", *times_us, 1.0, covered)
    text = left_out_markdown([result], [entry("b", None, "timm"), entry("a", 1.0, "timm")])
    assert "| x | timm | 2 | 50.0 | 50.0 | +50.0 | 50.0 | 50.0 | 50 | 20.0 | 20.0 | +20.0 |" in text
    assert "| 20.0 | 20.0 | 100 |" in text
    assert text.endswith("\nStill fitted on timm: host.b\n")


def test_an_unknown_source_is_refused_with_the_known_ones() -> None:
    check_source("", ["timm"])
    check_source("Timm", ["timm", "vidur"])
    with pytest.raises(ValueError, match=r"unknown source 'tim'.*\['timm', 'vidur'\]"):
        check_source("tim", ["vidur", "timm"])


@pytest.fixture
def no_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if we had measured nothing ourselves."""
    monkeypatch.setattr(
        "itercast.extras.published.left_out_ops.own_rows", lambda name: pd.DataFrame()
    )


@pytest.mark.usefixtures("no_own_rows")
def test_held_shapes_are_on_no_other_side(tmp_path: Path) -> None:
    """Without the source no row of it is known; with it those of other shapes."""
    rows = read_ops(two_sources(tmp_path))
    assert op_sources(tmp_path) == ["deepgemm", "pipeweave"]
    found = {split.source: split for split in splits(rows)}
    assert list(found) == ["deepgemm", "pipeweave"]
    for name, split in found.items():
        assert set(split.held[PUBLISHER]) == {name}
        assert name not in set(split.others[PUBLISHER])
        own = split.all_rows[split.all_rows[PUBLISHER] == name]
        shapes = [set(zip(t["m"], t["n"], strict=True)) for t in (own, split.held)]
        assert len(own) + len(split.held) == 169
        assert not shapes[0] & shapes[1]
    assert [s.source for s in splits(rows, source="DeepGEMM")] == ["deepgemm"]
    assert not list(splits(rows, only="conv"))


@pytest.mark.usefixtures("no_own_rows")
def test_nothing_is_learned_from_fewer_than_thirty_rows(tmp_path: Path) -> None:
    """DeepGEMM is not forecast by 29 rows of PipeWeave, but these are by DeepGEMM's."""
    rows = read_ops(two_sources(tmp_path))["gemm"]
    theirs = rows[rows[PUBLISHER] == "pipeweave"]
    for count, sources in ((29, ["pipeweave"]), (30, ["deepgemm", "pipeweave"])):
        few = pd.concat([rows[rows[PUBLISHER] == "deepgemm"], theirs.head(count)])
        assert [s.source for s in splits({"gemm": few})] == sources


def test_what_is_known_is_written_before_the_rest_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Iterator[LineResult]:
        yield compared("gemm", "deepgemm", np.ones(1), np.ones(1), np.ones(1), 0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("itercast.extras.published.report.run_left_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report(two_sources(tmp_path), "gemm, source", "", SHIPPED, tmp_path / "out")
    assert "| gemm | deepgemm | 1 |" in (tmp_path / "out" / "bench-public.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("no_own_rows")
def test_a_source_left_out_is_forecast_by_the_others(tmp_path: Path) -> None:
    """At half the other's rate DeepGEMM's products look twice as slow as they are."""
    (result,) = run_left_out(two_sources(tmp_path), NAME.format("gemm"), "deepgemm")
    assert (result.line, result.part, result.rows) == ("gemm, source left out", "deepgemm", 34)
    without, with_it = (result.scores[name]["bias_pct"] for name in ("left out", "itercast"))
    assert without == pytest.approx(100, abs=15)
    assert with_it == pytest.approx(0, abs=15)


def iterations(source: str) -> pd.DataFrame:
    """A row that names its attention kernel; made up, measured in half of the forecast time."""
    row = {"gpu": "a100-sxm-80gb", "case": "gpt2-small", "batch": 8, "seq": 1024, "dtype": "bf16"}
    row |= {"plan": "", "mode": "train", "loss": "default", "optimizer": "adamw", "attn": "sdpa"}
    row |= {"amp": False, "engine": "graph", "memory_format": "", "stack": "torch-2.0"}
    row |= {"attention_kernel": "triton", "step": 2e6, "backward": 0.0, "memory": 0.0}
    row |= {"step_p10": 1e6, "step_p90": 3e6}
    return pd.DataFrame([{**row, "time_us": 1e6, "source": source, "nodes": np.nan}])


def test_a_source_that_nothing_was_fitted_on_has_the_same_errors(tmp_path: Path) -> None:
    found = ForecastLine(line=LINE, rows=iterations("somebody"), seconds=1.0)
    (result,) = run_models_left_out(tmp_path, [found], SHIPPED)
    assert result.part == "somebody"
    assert result.scores["left out"] == result.scores["itercast"]
    assert result.scores["itercast"]["bias_pct"] == pytest.approx(100)


@pytest.mark.slow
def test_forecasts_of_a_fitted_source_are_made_anew_without_it(tmp_path: Path) -> None:
    """Products of 50,257 words run at half an H100's peak without Lambda's rows, else a quarter."""
    rows = iterations("lambda-deeplearning-benchmark").assign(gpu="h100-sxm-80gb")
    found = ForecastLine(line=LINE, rows=rows, seconds=1.0)
    (left,) = run_models_left_out(tmp_path, [found], SHIPPED)
    assert left.scores["itercast"]["bias_pct"] == pytest.approx(100)
    usual = ForecastLine(line=LINE, rows=with_forecast(rows), seconds=1.0)
    (again,) = run_models_left_out(tmp_path, [usual], SHIPPED)
    without, with_it = (again.scores[name]["bias_pct"] for name in ("left out", "itercast"))
    assert without < with_it
    assert {again.scores[name]["coverage_pct"] for name in ("left out", "itercast")} <= {0, 50, 100}


def with_forecast(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the forecasts of this process, which leaves nothing out."""
    from concurrent.futures import ThreadPoolExecutor

    from itercast.extras.published.models import add_forecasts

    with ThreadPoolExecutor(1) as pool:
        plain = without_forecasts(rows)
        return add_forecasts(plain, SHIPPED, {}, pool)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_command_prints_one_source_alone(tmp_path: Path) -> None:
    """A wrong name is answered with the sources in the folder."""
    public, out = two_sources(tmp_path), tmp_path / "out"
    assert "gemm, source left out" in line_names()
    name = ["bench-public", str(public), "--out", str(out), "--line", "gemm, source"]
    wrong = typed(*name, "--leave-out", "deepgem", rc=2)
    assert "unknown source 'deepgem'" in wrong.output.replace("\n", " ")
    typed(*name, "--leave-out", "deepgemm")
    text = (out / "bench-public.md").read_text()
    assert text.count("| deepgemm | 34 |") == 1
    assert "pipeweave" not in text


def test_a_model_made_quickly_has_intervals_too() -> None:
    """They contain the forecast and most of the rows; those of an unseen device are wider."""
    rows = usable_rows([DATASETS], ["norm"])["norm"]
    prepared = prepare(rows, families()["norm"], hardware_of([DATASETS], rows))
    model = quick_model_with_intervals(prepared, default_options(prepared.table))
    (low, high), (unseen_low, unseen_high) = model.offsets, model.unseen_offsets
    assert low < 0 < high
    assert unseen_low < low
    assert unseen_high > high
    error = log_error(model, prepared, np.arange(len(rows)))
    assert np.mean((error > low) & (error < high)) > 0.8
    assert set(model.envelope) == set(prepared.envelope)
