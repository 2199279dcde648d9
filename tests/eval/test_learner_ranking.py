"""Learners ranked per family and on whole iterations, which their op prices make up."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from itercast.__main__ import app
from itercast.commands.shared import fit
from itercast.compose.forecast import forecast
from itercast.eval.learner_ranking import chart, family_medians, learner_bundles, markdown
from itercast.eval.learner_table import cells, error_text
from itercast.learners.bundle import Bundle
from itercast.learners.models.compared import NAMES
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.opcall import StepCapture
from itercast.microbench.ops.matrix import gemm
from itercast.microbench.plan import ParallelPlan
from itercast.microbench.store import write_card, write_part

TOY = Gpu(name="toy", sm_count=8, peak_flops_per_s={"fp32": 1e13}, hbm_bytes_per_s=1e12)
MEDIANS = {"gemm": {"blend": 2.0, "forest": 4.0}, "norm": {"blend": 3.0, "forest": 1.0}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Products on a device of 8 cores: three times the roofline, more for few rows."""
    root, rows = tmp_path_factory.mktemp("data"), []
    for p in islice(gemm.sweep(), 60):
        roof_us = max(gemm.flops(p) / 1e13, gemm.bytes_moved(p) / 1e12) * 1e6 + 2
        facts = {"family": "gemm", "gpu": "toy", "threads": 0, "cache": "warm", "status": "ok"}
        rows.append({**asdict(p), **facts, "time_us": 3 * roof_us * (1 + 8 / p.m**0.5)})
    path = write_part(root, "gemm", "toy", pd.DataFrame(rows), "0")
    write_card(path.parent, {"hardware": TOY.to_dict()})
    return root


def test_the_smallest_error_of_a_line_is_bold() -> None:
    text = markdown(MEDIANS)
    gemm_line, norm_line = text.strip().splitlines()[-2:]
    assert "**2.0**" in gemm_line and "| 4.0 |" in gemm_line
    assert "**1.0**" in norm_line and "| 3.0 |" in norm_line
    assert [t for t, best in cells(MEDIANS["gemm"]) if best] == ["2.0"]
    assert cells({}) == [("-", False)] * len(NAMES)
    assert [error_text(e) for e in (8.84, 99.94, 99.96, 1313.4)] == ["8.8", "99.9", "100", "1313"]


def test_the_chart_has_a_dot_per_family_and_learner() -> None:
    (axes,) = chart(MEDIANS).axes
    dots = {c.get_label(): c.get_offsets().tolist() for c in axes.collections}
    assert dots["forest"] == [[4.0, 0.0], [1.0, 1.0]]
    assert dots["linear"] == []


def test_iterations_are_composed_of_each_learners_prices(
    data: Path, mlflow_store: str, tmp_path: Path, gpt: StepCapture
) -> None:
    """A training leaves its scores in the bundle; every learner forecasts another iteration."""
    folder = tmp_path / "bundle"
    fit([data], folder, None, 0)
    assert set(family_medians(folder)["gemm"]) == set(NAMES)
    bundle = Bundle.load(folder)
    others = learner_bundles(bundle, data)
    assert {*others, "blend"} == set(NAMES)
    plan = ParallelPlan.parse("")
    found = {}
    for name, one in {"blend": bundle, **others}.items():
        optimizer = gpt.optimizer
        got = forecast(gpt, one, TOY, plan, bundle_name="b", threads=0, optimizer=optimizer)
        found[name] = got.by_family_us["gemm"]
    assert all(us > 0 for us in found.values())
    assert len({round(us, 3) for us in found.values()}) == len(NAMES)


def test_ranking_learners_needs_the_bundle_they_are_compared_with() -> None:
    result = CliRunner().invoke(app, ["evaluate", "--learners", "datasets"])
    assert result.exit_code == 2 and "--learners needs --bundle" in result.output
