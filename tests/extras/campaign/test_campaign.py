"""The GPU campaign: stages, budgets, what its first rows must show, no heavy packages."""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from itercast.capture.base.files import write_atomic
from itercast.capture.cases.registry import case
from itercast.extras.campaign import campaign
from itercast.extras.campaign.smoke import ImplausibleRows, check
from itercast.extras.campaign.stages import Run, Stage
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.iterations import collect as rounds
from itercast.microbench.iterations.measure import Iteration, measure_iteration
from itercast.microbench.iterations.worker import IterationOrder, iteration_row
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.memory.elementwise import Elementwise
from itercast.microbench.processes.watch import EXIT_BROKEN
from itercast.microbench.store import Journal, read_rows, write_part

ROOT = Path(__file__).parents[3]
HEAVY = (
    "xgboost",
    "optuna",
    "mlflow",
    "pandera",
    "sklearn",
    "matplotlib",
    "psutil",
    "transformers",
)


class Toys:
    """Stages that take their time on a clock of their own, and a campaign of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, end_s: float) -> None:
        self.now_s = 100.0
        self.given: list[tuple[str, int]] = []
        monkeypatch.setattr(campaign.time, "monotonic", lambda: self.now_s)
        run = Run(root=folder, seed=0, points=None)
        archive = folder / "box.tar.gz"
        self.campaign = campaign.Campaign(
            run=run, archive=archive, end_s=100.0 + end_s, began_s=100.0, saved_s=100.0
        )

    def stage(self, name: str, seconds: float, takes_s: float) -> Stage:
        def measure(run: Run, budget_s: float, grace_s: float) -> int:
            self.given.append((name, round(budget_s)))
            self.now_s += takes_s
            return 7

        return Stage(name=name, seconds=seconds, measure=measure)


def test_each_stage_has_its_share_of_the_time_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """60, 540 and 300 s of a plan in 450 s are half of that: 30, 270 and 150.

    The first takes 10 s, so that 440 are left: 440 * 540 / 840 = 283 for the second. That takes
    437, and 3 s are too little for the third.
    """
    toys = Toys(monkeypatch, tmp_path, 450.0)
    stages = [toys.stage("smoke", 60, 10), toys.stage("ops", 540, 437), toys.stage("last", 300, 0)]
    toys.campaign.measure(stages)
    assert toys.given == [("smoke", 30), ("ops", 283)]
    assert toys.campaign.run.notes == [
        "smoke: done, 10 s of 30 s planned, 7 rows",
        "ops: done, 437 s of 270 s planned, 7 rows",
        "last: skipped, 3 s are left of 150 s planned",
    ]


def test_a_stage_with_less_time_than_planned_is_said_to_be_cut(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two halves of 100 s; the first takes 70."""
    toys = Toys(monkeypatch, tmp_path, 100.0)
    toys.campaign.measure([toys.stage("ops", 1, 70), toys.stage("last", 1, 30)])
    assert toys.campaign.run.notes[1] == "last: cut, 30 s of 50 s planned, 7 rows"


def test_a_stage_that_fails_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toys = Toys(monkeypatch, tmp_path, 60.0)

    def measure(run: Run, budget_s: float, grace_s: float) -> int:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        toys.campaign.measure([Stage(name="ops", seconds=1, measure=measure)])
    assert toys.campaign.run.notes == ["ops: stopped by RuntimeError, 0 s of 60 s planned, 0 rows"]


def test_an_archive_is_written_while_a_stage_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two minutes after the last one; a process that is killed then brings home that much."""
    toys = Toys(monkeypatch, tmp_path, 600.0)
    toys.now_s += 119
    toys.campaign.progress()
    assert not toys.campaign.archive.exists()
    toys.now_s += 2
    toys.campaign.progress()
    assert toys.campaign.archive.exists()


def fake_process(
    monkeypatch: pytest.MonkeyPatch, codes: list[tuple[int, int]]
) -> list[tuple[Iteration, ...]]:
    """Iteration workers that journal so many rows and end with such a code; what each was given."""
    given: list[tuple[Iteration, ...]] = []
    monkeypatch.setattr(rounds, "card_facts", lambda root, device: {"hardware": {"name": "toy"}})

    def start(module: str, order: dict[str, Any], ranks: int, log: Path) -> subprocess.Popen[bytes]:
        asked = tuple(Iteration(**one) for one in order["iterations"])
        given.append(asked)
        count, code = codes[len(given) - 1]
        made = IterationOrder(**{**order, "iterations": asked})
        journal = Journal(Path(order["root"]), order["run_id"])
        for one in asked[:count]:
            journal.append([iteration_row(made, one, {"status": "ok", "time_us": 1.0})])
        journal.close()
        hang = "import time; time.sleep(60)"  # instead of a negative code
        what = hang if code < 0 else f"import os; os._exit({code})"
        return subprocess.Popen([sys.executable, "-c", what])

    monkeypatch.setattr(rounds, "start_ranks", start)
    return given


def test_a_worker_on_a_cpu_that_aborts_has_failed_unless_all_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo sometimes aborts a rank that ends; one that aborts before its row is an error."""
    wanted = [Iteration(case="mlp-s", batch=1)]
    fake_process(monkeypatch, [(1, 6)])
    assert rounds.collect_iterations(tmp_path / "all", "cpu", wanted, 0) == 1
    fake_process(monkeypatch, [(0, 6)])
    with pytest.raises(RuntimeError, match="measuring iterations failed"):
        rounds.collect_iterations(tmp_path / "none", "cpu", wanted, 0)


def test_an_iteration_that_ends_its_process_is_a_row_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker dies at the third of five; the second says itself what broke the GPU."""
    wanted = [Iteration(case="mlp-s", batch=n) for n in range(1, 6)]
    given = fake_process(monkeypatch, [(2, 139), (1, EXIT_BROKEN), (1, 0)])
    assert rounds.collect_iterations(tmp_path, "cuda", wanted, 0) == 5
    assert [len(g) for g in given] == [5, 2, 1]
    rows = read_rows([tmp_path], "iteration").set_index("batch")
    assert rows["status"].to_dict() == {1: "ok", 2: "ok", 3: "error", 4: "ok", 5: "ok"}
    assert rows["reason"][3] == "its process ended with code 139"
    assert rounds.collect_iterations(tmp_path, "cuda", wanted, 0) == 0
    assert rounds.collect_iterations(tmp_path, "cuda", wanted, 1, budget_s=0.0) == 0


def test_an_iteration_that_hangs_is_a_row_and_one_cut_by_the_clock_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker measures one of three and hangs; the second has time to, but the run not."""
    wanted = [Iteration(case="mlp-s", batch=n) for n in (1, 2)]
    wanted.append(Iteration(case="mlp-s", batch=3, engine="graph"))
    given = fake_process(monkeypatch, [(1, -1), (0, -1)])
    monkeypatch.setattr(rounds, "STALLED_S", {"eager": 1.0, "graph": 60.0})
    rounds.collect_iterations(tmp_path, "cuda", wanted, 0, budget_s=3.0, grace_s=0.2)
    assert [len(g) for g in given] == [3, 1]
    rows = read_rows([tmp_path], "iteration").set_index("batch")
    assert rows["status"].to_dict() == {1: "ok", 2: "error"}


def test_an_iteration_in_bf16_is_stored_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    chosen = case("mlp-s")

    def build() -> Any:
        model = chosen.build()
        seen.extend({p.dtype for p in model.parameters()})
        return model

    from dataclasses import replace

    row = measure_iteration(
        replace(chosen, build=build),
        Iteration(case="mlp-s", batch=2, dtype="bf16"),
        "cpu",
        repetitions=2,
    )
    assert (row["status"], seen) == ("ok", [torch.bfloat16])
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(NotImplementedError, match="graph"):
        measure_iteration(chosen, Iteration(case="mlp-s", batch=2, engine="graph"), "cpu")
    with pytest.raises(ValueError, match="engine 'x': allowed are eager, graph, compile"):
        Iteration(case="mlp-s", batch=2, engine="x")


def test_collect_needs_no_heavy_package(tmp_path: Path) -> None:
    """In every process of a sweep: torch, pandas, pyarrow, typer, rich, pyyaml, pynvml suffice."""
    blocker = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {HEAVY!r}:\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    (tmp_path / "sitecustomize.py").write_text(blocker)
    write_atomic(tmp_path / "out/.journal/points-cpu-0.json", b'{"random": []}')
    command = ["-m", "itercast", "collect", "--family", "random", "--budget", "2s"]
    done = subprocess.run(
        [sys.executable, *command, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(read_rows([tmp_path / "out"], "random"))


TOY = Gpu(name="toy", sm_count=1, peak_flops_per_s={"fp32": 1e12}, hbm_bytes_per_s=1e11)
# 2 * 1000^3 flops at 1e12 a second: 2000 us; 3 * 1000^2 * 4 bytes at 1e11 a second: 120 us
FINE = {"gpu": "toy", "status": "ok", "reason": "", "cache": "warm"}
PRODUCT = {**asdict(Gemm(op="mm", m=1000, n=1000, k=1000, dtype="fp32")), "family": "gemm", **FINE}
# a sum of two tensors of 1e6 elements: 12e6 bytes at 1e11 a second, 120 us
SUM = {**asdict(Elementwise(op="add", numel=10**6, tensors=2)), "family": "elementwise", **FINE}


def wrong(root: Path, *rows: dict[str, Any]) -> list[str]:
    """What is wrong with the rows, one part each."""
    for number, row in enumerate(rows):
        write_part(root, row["family"], "toy", pd.DataFrame([row]), str(number))
    return check(root, TOY, ("gemm", "elementwise"))


def test_times_at_the_roofline_are_fine(tmp_path: Path) -> None:
    """A warm cache may serve the sum ten times as fast as memory does."""
    rows = ({**SUM, "cache": "cold", "time_us": 130.0}, {**SUM, "cache": "warm", "time_us": 13.0})
    assert wrong(tmp_path, {**PRODUCT, "time_us": 2100.0}, *rows) == []


def test_times_below_six_tenths_of_it_are_listed(tmp_path: Path) -> None:
    """0.6 * 2000 = 1200 us for the product, 0.6 * 120 = 72 for the cold sum."""
    bad = [{**PRODUCT, "time_us": 1100.0}, {**SUM, "cache": "cold", "time_us": 60.0}]
    good = [{**PRODUCT, "time_us": 1300.0}] * 2
    assert wrong(tmp_path, *bad, *good) == [
        "gemm: 1 of 3 times are implausible, e.g. mm warm: 1.1e+03 us, roofline 2e+03 us",
        "elementwise: 1 of 1 times are implausible, e.g. add cold: 60 us, roofline 120 us",
    ]


def test_a_family_without_rows_is_listed(tmp_path: Path) -> None:
    failed = {**SUM, "cache": "warm", "status": "error", "reason": "no"}
    found = wrong(tmp_path, {**PRODUCT, "time_us": 2100.0}, failed)
    assert found == ["elementwise: none of 1 rows is ok"]


def test_mostly_implausible_rows_end_the_run(tmp_path: Path) -> None:
    expected = r"gemm: 1 of 1 times.*elementwise: none of 0 rows is ok"
    with pytest.raises(ImplausibleRows, match=expected):
        wrong(tmp_path, {**PRODUCT, "time_us": 0.0})
