"""The report on models trained on one GPU's own rows, on rows of the CPU in datasets/."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
import yaml
from report_facts import case
from rich.console import Console
from typer.testing import CliRunner

from itercast.__main__ import app
from itercast.eval.gpu_report import iteration_errors, only_gpu
from itercast.eval.results import error_table
from itercast.microbench.store import read_rows, write_atomic, write_part

DATASETS = Path(__file__).parents[2] / "datasets"
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
    done = CliRunner().invoke(app, words, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
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


def test_a_gpu_without_rows_is_one_line(root: Path) -> None:
    done = CliRunner().invoke(app, ["gpu-report", str(root), "--gpu", "h9"])
    assert done.exit_code == 2
    assert "gpu 'h9': no rows under" in done.output


def test_a_folder_that_is_not_there_is_one_line() -> None:
    done = CliRunner().invoke(app, ["gpu-report", "nowhere"])
    assert done.exit_code == 2
    assert "data 'nowhere': no such folder" in done.output
