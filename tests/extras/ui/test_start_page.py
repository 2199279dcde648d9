"""What the first page of MLflow's UI lists."""

from types import SimpleNamespace
from typing import Any

from itercast.extras.ui.start_page import lines


def run(family: str, learner: str, rank: int, error: float, **tags: str) -> Any:
    """What the first page reads of a run."""
    data = SimpleNamespace(
        tags={"family": family, "learner": learner, **tags},
        metrics={"rank": rank, "median_ape_pct": error},
    )
    return SimpleNamespace(data=data, info=SimpleNamespace(run_id=f"{family}-{learner}"))


def test_the_first_page_has_a_line_per_family_the_best_first() -> None:
    """Of equals the one that prices comes first, then smaller errors; the runner-up is no equal."""
    runs = [
        run("norm", "a", 1, 9.0, prices="yes"),
        run("norm", "b", 1, 8.0),
        run("gemm", "a", 3, 5.0, prices="yes"),
        run("gemm", "b", 1, 2.0),
        run("gemm", "c", 2, 4.0),
    ]
    gemm_line, norm_line = lines(runs)
    names = [r.data.tags["learner"] for r in (*gemm_line.first, *gemm_line.others)]
    assert (gemm_line.family, names) == ("gemm", ["b", "c", "a"])
    assert gemm_line.prices is not None and gemm_line.prices.data.tags["learner"] == "a"
    assert [r.data.tags["learner"] for r in norm_line.first] == ["a", "b"]
    assert norm_line.ids == ["norm-a", "norm-b"]
