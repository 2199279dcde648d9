"""The GPU campaign: its list of iterations, its budget, what it does without the heavy packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from itercast.microbench.campaign import campaign
from itercast.microbench.campaign.stages import PLANS, Run, Stage, chosen_stages
from itercast.microbench.cases.registry import case
from itercast.microbench.iterations import collect as rounds
from itercast.microbench.iterations.gpu_list import DLRM, FIRST, gpu_iterations
from itercast.microbench.iterations.measure import Iteration, measure_iteration
from itercast.microbench.iterations.worker import IterationOrder, iteration_key, iteration_row
from itercast.microbench.store import Journal, read_rows, write_atomic
from itercast.microbench.sweep.gpu_chunk_worker import EXIT_BROKEN

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


def test_the_campaign_measures_every_kind_of_iteration() -> None:
    wanted = gpu_iterations()
    assert len(wanted) == len(set(wanted)) >= 60
    assert set(DLRM) <= {w.case for w in wanted}
    assert {w.dtype for w in wanted} == {"fp32", "tf32", "bf16"}
    assert {w.engine for w in wanted} >= {"eager", "graph", "compile"}
    first = wanted[: len(FIRST)]
    kinds = {w.case.split("-")[0] for w in first}
    assert {"gpt2", "bert", "llama", "vit", "resnet", "dlrm", "switch", "unet"} <= kinds
    assert {w.dtype for w in first} == {"fp32", "tf32", "bf16"}


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


def test_plans_fill_the_commands_of_a_lent_half_hour() -> None:
    """Two of ten minutes on the first GPU, one of seven on another; names are a plan's own."""
    seconds = {s.name: s.seconds for s in PLANS["first"]}
    assert seconds["smoke"] + seconds["ops"] == 600
    assert seconds["iterations"] + seconds["second"] <= 600
    assert sum(s.seconds for s in PLANS["unseen"]) == 420
    assert [s.name for s in chosen_stages("first", ["second", "ops"])] == ["ops", "second"]


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
    with pytest.raises(RuntimeError, match="measuring mlp-s  failed"):
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


def test_an_eager_iteration_has_the_key_it_had_before_engines() -> None:
    """So that a resumed dataset repeats nothing."""
    order = IterationOrder(
        root="", run_id="", device="cpu", gpu="x", threads=2, ranks=1, repeat=0, iterations=()
    )
    asked = Iteration(case="mlp-s", batch=64)
    assert iteration_key(order, asked) == "eb0470c32c6046f7"
    graph = Iteration(case="mlp-s", batch=64, engine="graph")
    assert iteration_key(order, graph) != iteration_key(order, asked)


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
