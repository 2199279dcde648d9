"""Reports of training: models of one GPU's own rows, learners by family."""

from io import StringIO
from pathlib import Path

import pytest
import yaml
from report_facts import case
from rich.console import Console
from toy_products import write_products
from typed_commands import typed

from itercast.capture.base.files import write_atomic
from itercast.eval.learner_ranking import cell, learner_table
from itercast.extras.benchmarks.gpu_report import error_table, iteration_errors, only_gpu
from itercast.microbench.store import read_rows, write_part

DATASETS = Path(__file__).parents[3] / "datasets"
CPU = "intel-xeon-2.50ghz-2c"
TWIN = "twin"


def test_iterations_are_scored_by_kind_of_model() -> None:
    """DLRM: 110 and 90 for 100 are +10 and -10 %: no bias; a GPT alone at 104 has +4 %."""
    times = {"dlrm-r00": 110.0, "dlrm-r01": 90.0, "gpt2-xl": 104.0}
    found = iteration_errors([case(name, us, 100.0) for name, us in times.items()])
    assert set(found) == {"DLRM (2)", "transformers (1)"}
    assert found["DLRM (2)"]["geomean_ape_pct"] == pytest.approx(10.0)
    assert found["DLRM (2)"]["bias_pct"] == pytest.approx(0.0)
    assert found["DLRM (2)"]["noise_floor_pct"] == 2.0
    assert found["transformers (1)"]["bias_pct"] == pytest.approx(4.0)


def test_a_table_shows_what_is_unknown_as_a_dash() -> None:
    written = StringIO()
    console = Console(width=200, file=written)
    console.print(error_table("x", {"gemm": {"median_ape_pct": 2.25, "bias_pct": -1.0}}))
    line = next(line for line in written.getvalue().splitlines() if "gemm" in line)
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells == ["gemm", "2.2", "-", "-", "-", "-1.0", "-", "-"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some rows of the CPU's, and the same as those of a twin of it."""
    folder = tmp_path_factory.mktemp("data")
    for family, count in (("gemm", 400), ("iteration", 2000)):
        rows = read_rows([DATASETS], family)
        if family == "iteration":
            rows = rows[(rows["case"] == "mlp-s") & (rows["plan"] == "")]
        rows = rows.head(count)
        card = yaml.safe_load(next((DATASETS / family / CPU).glob("*/card.yaml")).read_text())
        for gpu in (CPU, TWIN):
            card["hardware"]["name"] = gpu
            write_part(folder, family, gpu, rows.assign(gpu=gpu), "one")
            write_atomic(
                folder / family / gpu / "itercast" / "card.yaml", yaml.safe_dump(card).encode()
            )
    return folder


def test_the_rows_of_one_gpu_are_a_root_of_their_own(root: Path, tmp_path: Path) -> None:
    alone = only_gpu(root, TWIN, tmp_path / "alone")
    assert set(read_rows([alone], "gemm")["gpu"]) == {TWIN}
    with pytest.raises(ValueError, match=rf"gpu 'h9': no rows under .*\['{CPU}', '{TWIN}'\]"):
        only_gpu(root, "h9", tmp_path / "none")


def test_the_command_trains_on_one_and_forecasts_the_other(root: Path) -> None:
    words = ["gpu-report", str(root), "--gpu", CPU, "--unseen", TWIN]
    done = typed(*words, env={"COLUMNS": "160"})
    for title in (
        f"rows of {CPU}",
        f"{CPU}: ops, shapes left out",
        f"{CPU}: iterations",
        f"rows of {TWIN}",
        f"{TWIN}, trained on {CPU} alone: ops",
        f"{TWIN}, trained on {CPU} alone: iterations",
    ):
        assert title in done.output
    assert done.output.count("other models (1)") == 2


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
        cell(SCORES["gemm"].get(name)).markup for name in ("blend", "linear", "nearest", "roofline")
    ] == [*("[bold]2.0[/bold]", "[bold]1.9[/bold]", "4.0", "-")]
    assert [cell(scored(e, 2)).plain for e in (8.84, 99.94, 99.96, 1313.4)] == [
        *("8.8", "99.9", "100", "1313")
    ]
    table = learner_table([(name, ("9",), some) for name, some in SCORES.items()], ("rows",))
    assert [c.header for c in table.columns] == ["family", "rows", "blend", "near-\nest", "linear"]
