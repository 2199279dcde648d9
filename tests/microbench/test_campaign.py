"""The GPU campaign: its list of iterations, its budget, what it does without the heavy packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from microbench import campaign
from microbench import collect_iterations as rounds
from microbench.campaign import Stage
from microbench.cases.registry import case
from microbench.chunk_worker import EXIT_BROKEN
from microbench.gpu_iterations import DLRM, gpu_iterations
from microbench.iteration_worker import IterationOrder, iteration_key, row_facts
from microbench.iterations import Iteration, measure
from microbench.store import Journal, read_rows, write_atomic

ROOT = Path(__file__).parents[2]
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
    assert Counter(w.engine for w in wanted)["graph"] >= 5
    early = {w.case.split("-")[0] for w in wanted[:25]}
    assert {"gpt2", "bert", "llama", "vit", "resnet", "dlrm", "switch", "unet"} <= early


def test_random_dlrms_are_as_in_the_paper() -> None:
    """arXiv:2404.12674: 36 to 66 tables, batches of 512 to 4096, half of the tasks heavy."""
    for name in DLRM:
        chosen = case(name)
        given = chosen.inputs(4, 0)
        assert 36 <= len(given["indices"]) <= 66
        assert 512 <= chosen.batch <= 4096
        heavy = given["indices"].shape[1] // 4 >= 20
        assert heavy == bool(int(name[-2:]) % 2)


def test_a_unet_keeps_its_size() -> None:
    from microbench.cases.unet import UNet

    model = UNet(width=4, depth=2, classes=3)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 3, 16, 16)


def test_a_run_gives_each_stage_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(campaign.time, "monotonic", lambda: now[0])
    given: list[tuple[str, float]] = []

    def stage(name: str, share: float, takes: float) -> Stage:
        def measure(seconds: float) -> int:
            given.append((name, seconds))
            now[0] += min(takes, seconds)
            return 7

        return Stage(name=name, seconds=lambda left_s: share * left_s, measure=measure)

    plan = [
        stage("ops", 0.5, 1e9),
        stage("once", 1, 40),
        stage("twice", 1, 1e9),
        stage("more", 1, 9),
    ]
    rows = campaign.run(200.0, iter(plan))
    assert given == [("ops", 100.0), ("once", 100.0), ("twice", 60.0)]  # nothing left for more
    assert rows == {"ops": 7, "once": 7, "twice": 7}


def fake_process(
    monkeypatch: pytest.MonkeyPatch, codes: list[tuple[int, int]]
) -> list[tuple[Iteration, ...]]:
    """Iteration workers that journal so many rows and end with such a code; what each was given."""
    given: list[tuple[Iteration, ...]] = []
    monkeypatch.setattr(rounds, "card_facts", lambda root, device: {"hardware": {"name": "toy"}})

    def start(module: str, order: dict[str, Any], ranks: int) -> subprocess.Popen[bytes]:
        asked = tuple(Iteration(**one) for one in order["iterations"])
        given.append(asked)
        count, code = codes[len(given) - 1]
        made = IterationOrder(**{**order, "iterations": asked})
        journal = Journal(Path(order["root"]), order["run_id"])
        for one in asked[:count]:
            row = {**asdict(one), **row_facts(made, one), "status": "ok", "time_us": 1.0}
            journal.append([row])
        journal.close()
        return subprocess.Popen([sys.executable, "-c", f"import os; os._exit({code})"])

    monkeypatch.setattr(rounds, "start_ranks", start)
    return given


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

    row = measure(
        replace(chosen, build=build),
        Iteration(case="mlp-s", batch=2, dtype="bf16"),
        "cpu",
        repetitions=2,
    )
    assert (row["status"], seen) == ("ok", [torch.bfloat16])
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(NotImplementedError, match="graph"):
        measure(chosen, Iteration(case="mlp-s", batch=2, engine="graph"), "cpu")
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
    assert len(read_rows([tmp_path / "out"], "random")) > 4
