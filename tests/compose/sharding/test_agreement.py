"""``itercast shard`` and a plan with ``shard`` forecast the same iteration of the same DLRM."""

from __future__ import annotations

from pathlib import Path

import pytest

from itercast.compose.capture_model import capture
from itercast.compose.parallel.captured_tables import captured_tables
from itercast.compose.parallel.placement import Placement, Sharding, to_torchrec
from itercast.compose.predict import predict
from itercast.compose.pricing.sharded_tables import greedy_sharding
from itercast.compose.sharding.costs import Costs
from itercast.compose.sharding.forecast import forecast_sharding
from itercast.compose.sharding.propose import cut_until_even, greedy_by, table_costs
from itercast.compose.sharding.tables import RankingModel
from itercast.compose.target import find_target
from itercast.microbench.opcall import StepCapture


def ranking_model(step: StepCapture) -> RankingModel:
    """What ``itercast shard`` would be told of a captured DLRM."""
    shapes = {p.name: p.shape for p in step.parameters if p.name.endswith("weight")}
    bottom, top = (
        [shape for name, shape in shapes.items() if name.startswith(part)]
        for part in ("bottom", "top")
    )
    return RankingModel(
        batch=step.samples,
        tables=tuple(t.table for t in captured_tables(step)),
        features=bottom[0][1],
        bottom=tuple(shape[0] for shape in bottom[:-1]),
        top=tuple(shape[0] for shape in top[:-1]),
    )


def both_us(
    case: str, gpu: str, ranks: int, place: Placement | None, path: Path, batch: int | None = None
) -> tuple[float, float]:
    """The iteration by both ways; None is the greedy sharding by forecast."""
    step = capture(case, optimizer="sgd", batch=batch)
    model = ranking_model(step)
    costs = Costs(model, find_target(gpu, f"dp={ranks}"), ranks)
    sharding: Sharding = tuple(place for _ in model.tables) if place else ()
    sharding = sharding or greedy_by(table_costs(costs)["forecast"], costs)
    path.write_text(to_torchrec(sharding, model.tables, costs.per_node, "cuda"))
    plan = f"dp={ranks},shard={path}"
    return forecast_sharding(sharding, costs).iteration_us, predict(
        step, gpu=gpu, plan=plan
    ).iteration_us


@pytest.mark.parametrize(
    ("case", "gpu", "ranks", "batch", "place", "tolerance"),
    [
        ("dlrm-m", "cpu", 2, None, None, 0.12),
        ("dlrm-m", "cpu", 2, None, Placement("row_wise", (0, 1)), 0.12),
        ("dlrm-r04", "a100-sxm-80gb", 8, None, None, 0.08),  # bound by the GPU
        ("dlrm-r06", "h100-sxm-80gb", 16, None, None, 0.08),
        ("dlrm-r00", "h100-sxm-80gb", 4, 512, None, 0.3),  # bound by the host, whose Python
    ],  # the one knows of the whole model, the other of the dense part
)
def test_both_forecasts_agree(
    case: str,
    gpu: str,
    ranks: int,
    batch: int | None,
    place: Placement | None,
    tolerance: float,
    tmp_path: Path,
) -> None:
    quick_us, plan_us = both_us(case, gpu, ranks, place, tmp_path / "plan.json", batch)
    assert plan_us == pytest.approx(quick_us, rel=tolerance)


def test_both_spread_tables_greedily_alike() -> None:
    """The cost of a table's lookups, updates and messages is the same in both."""
    step = capture("dlrm-r04", optimizer="sgd")
    costs = Costs(ranking_model(step), find_target("a100-sxm-80gb", "dp=4"), 4)
    tables = captured_tables(step)
    rate = costs.where.slowest_bytes_per_s("dp")
    ours = greedy_sharding(step, tables, 4, costs.per_node, rate, costs.book, 0.0)
    assert ours == cut_until_even(costs)
