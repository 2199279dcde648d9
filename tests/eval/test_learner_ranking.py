"""Learners ranked per family and on whole iterations, which their op prices make up."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_facts import case
from toy_products import TOY, write_products
from typer.testing import CliRunner

from itercast.__main__ import app
from itercast.commands.shared import fit
from itercast.compose.forecast import forecast
from itercast.compose.pricing.price_book import PriceBook
from itercast.eval.learner_ranking import (
    cell,
    family_scores,
    iteration_scores,
    learner_bundles,
    learner_table,
)
from itercast.learners.bundle import Bundle
from itercast.learners.models.compared import NAMES
from itercast.microbench.opcall import StepCapture
from itercast.microbench.plan import ParallelPlan


def scored(median_ape_pct: float, rank: int) -> dict[str, float]:
    return {"median_ape_pct": median_ape_pct, "rank": rank}


SCORES = {  # linear and blend differ by no more than the noise
    "gemm": {"blend": scored(2.0, 1), "linear": scored(1.9, 1), "nearest": scored(4.0, 3)},
    "norm": {"blend": scored(3.0, 2), "nearest": scored(1.0, 1)},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_products(tmp_path_factory.mktemp("data"), 60, noise=0.0)


def test_learners_that_tie_within_the_noise_are_all_bold() -> None:
    assert [
        cell(SCORES["gemm"].get(name)) for name in ("blend", "linear", "nearest", "roofline")
    ] == [*("[bold]2.0[/]", "[bold]1.9[/]", "4.0", "-")]
    assert [cell(scored(e, 2)) for e in (8.84, 99.94, 99.96, 1313.4)] == [
        *("8.8", "99.9", "100", "1313")
    ]
    table = learner_table("x", [(name, ("9",), some) for name, some in SCORES.items()], ("rows",))
    assert [c.header for c in table.columns] == ["family", "rows", "blend", "near-\nest", "linear"]


def test_iterations_rank_learners_beyond_the_noise() -> None:
    """Off by 10 %, by 9 or 11 in turn, and by 50: the first two tie."""
    off = {"blend": [1.1, 1.1], "linear": [1.09, 1.11], "nearest": [1.5, 1.5]}
    found = {
        name: [case(str(i), 100 * pair[i % 2], 100) for i in range(20)]
        for name, pair in off.items()
    }
    ranks = {name: s["rank"] for name, s in iteration_scores(found).items()}
    assert ranks == {"blend": 1, "linear": 1, "nearest": 3}


def test_iterations_are_composed_of_each_learners_prices(
    data: Path, mlflow_store: str, tmp_path: Path, gpt: StepCapture
) -> None:
    """A training leaves its scores in the bundle; every learner forecasts another iteration."""
    folder = tmp_path / "bundle"
    fit([data], folder, None, 0)
    assert set(family_scores(folder)["gemm"]) == set(NAMES)
    bundle = Bundle.load(folder)
    others = learner_bundles(bundle, data)
    assert {*others, "blend"} == set(NAMES)
    plan = ParallelPlan.parse("")
    found = {}
    for name, one in {"blend": bundle, **others}.items():
        got = forecast(gpt, plan, PriceBook(one, TOY, 0))
        found[name] = got.by_family_us["gemm"]
    assert all(us > 0 for us in found.values())
    assert len({round(us, 3) for us in found.values()}) == len(NAMES)


def test_ranking_learners_needs_the_bundle_they_are_compared_with() -> None:
    result = CliRunner().invoke(app, ["evaluate", "--learners", "datasets"])
    assert result.exit_code == 2 and "--learners needs --bundle" in result.output
