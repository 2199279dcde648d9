"""``itercast shard`` and a plan with ``shard`` forecast the same iteration of the same DLRM."""

from __future__ import annotations

from pathlib import Path

import pytest

from itercast.compose.capture_model import capture
from itercast.compose.parallel.captured_tables import captured_tables
from itercast.compose.parallel.placement import Placement, Sharding, to_torchrec
from itercast.compose.predict import predict
from itercast.compose.sharding.forecast import Forecaster
from itercast.compose.sharding.propose import greedy_by, table_costs
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
    forecaster = Forecaster(model, find_target(gpu, f"dp={ranks}"), ranks)
    sharding: Sharding = tuple(place for _ in model.tables) if place else ()
    sharding = sharding or greedy_by(table_costs(forecaster)["forecast"], forecaster)
    path.write_text(to_torchrec(sharding, model.tables, forecaster.per_node, "cuda"))
    plan = f"dp={ranks},shard={path}"
    return forecaster.forecast(sharding).iteration_us, predict(
        step, gpu=gpu, plan=plan
    ).iteration_us


@pytest.mark.parametrize(
    ("case", "gpu", "ranks", "batch", "place"),
    [
        ("dlrm-m", "cpu", 2, None, None),
        ("dlrm-m", "cpu", 2, None, Placement("row_wise", (0, 1))),
        ("dlrm-r04", "a100-sxm-80gb", 8, None, None),  # bound by the GPU
        ("dlrm-r06", "h100-sxm-80gb", 16, None, None),
        ("dlrm-r00", "h100-sxm-80gb", 4, 512, None),  # bound by the host
    ],
)
def test_both_forecast_the_same_iteration(
    case: str, gpu: str, ranks: int, batch: int | None, place: Placement | None, tmp_path: Path
) -> None:
    """Within 0.5 %: sizes of copies and messages are rounded."""
    quick_us, plan_us = both_us(case, gpu, ranks, place, tmp_path / "plan.json", batch)
    assert quick_us == pytest.approx(plan_us, rel=0.005)


def test_copied_tables_are_forecast_as_under_a_plan(tmp_path: Path) -> None:
    """Half of the tables are copies, whose gradients DDP reduces with those of the dense part."""
    step = capture("dlrm-m", optimizer="sgd")
    forecaster = Forecaster(ranking_model(step), find_target("cpu", "dp=2"), 2)
    tables = forecaster.model.tables
    both = (Placement("data_parallel", (0, 1)), Placement("table_wise", (1,)))
    sharding: Sharding = tuple(both[i % 2] for i in range(len(tables)))
    path = tmp_path / "plan.json"
    path.write_text(to_torchrec(sharding, tables, forecaster.per_node, "cpu"))
    plan_us = predict(step, gpu="cpu", plan=f"dp=2,shard={path}").iteration_us
    assert forecaster.forecast(sharding).iteration_us == pytest.approx(plan_us, rel=0.02)
