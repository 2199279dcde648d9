"""Whole campaigns with real workers on a stand-in for CUDA (tests/standin)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from itercast.capture.base.files import write_atomic
from itercast.extras.campaign import campaign
from itercast.extras.campaign.archive import unpack
from itercast.extras.campaign.prepare import write_measured_points
from itercast.microbench import store
from itercast.microbench.ops import families
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.step.optimizer import OptimizerOp
from itercast.microbench.sweep.captured_points import points_path, write_points

ROOT = Path(__file__).parents[3]
WHOLE_S = 600.0  # of a plan's run, which ends when all is measured


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """As --prepare leaves it, but for the captured models, which take a minute."""
    folder = tmp_path / "prepared"
    write_points(points_path(folder, "cuda", 0), {name: [] for name in families()})
    write_atomic(folder / "commit.txt", b"0123abc")
    return folder


def start(
    root: Path, prepared: Path, *more: object, points: int | None = None
) -> subprocess.Popen[str]:
    """A campaign on the stand-in with so many points of each family; no git on the way."""
    command = [
        sys.executable,
        "-m",
        "itercast.extras.campaign",
        "--out",
        root,
        "--prepared",
        prepared,
    ]
    return subprocess.Popen(
        [str(word) for word in (*command, *more)],
        cwd=ROOT,
        env={
            "PATH": "/nowhere",
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONPATH": f"{ROOT / 'tests/standin'}:{ROOT}",
            "OMP_WAIT_POLICY": "passive",
            "STANDIN_POINTS": str(points or ""),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def all_rows(root: Path) -> pd.DataFrame:
    found = [store.read_rows([root], name) for name in (*families(), "iteration")]
    return pd.concat(found, ignore_index=True)


def finished(run: subprocess.Popen[str], within_s: float = 150) -> str:
    """What it said."""
    said = run.communicate(timeout=within_s)[0]
    assert run.returncode == 0, said
    return said


@pytest.mark.slow
def test_a_campaign_in_two_runs(tmp_path: Path, prepared: Path) -> None:
    """The second goes on from the first one's archive; together they repeat nothing."""
    one, two = tmp_path / "one.tar.gz", tmp_path / "two.tar.gz"
    line = ("--part", "smoke", "--budget", "100s", "--archive", one)
    said = finished(start(tmp_path / "a", prepared, *line, points=2))
    unpack(one, tmp_path / "home")
    before = all_rows(tmp_path / "home")
    assert set(before["gpu"]) == {"standin"}
    single = {n for n, f in families().items() if f.ranks == 1 and not f.on_demand}
    assert set(before["family"]) == {*single, "iteration"}, said
    assert re.search(rf"smoke: done, \d+ s of 80 s planned, {len(before)} rows", said)
    assert "gemm: none" not in said and f"{len(before)} rows of standin" in said
    card = next((tmp_path / "home").glob("gemm/standin/*/card.yaml")).read_text()
    assert "commit: 0123abc" in card
    assert len(list((tmp_path / "home/logs").iterdir())) == 4  # of three workers and the campaign

    line = ("--part", "iterations,second", "--budget", "100s", "--archive", two, "--from", one)
    said = finished(start(tmp_path / "b", prepared, *line, points=3))
    unpack(two, tmp_path / "after")
    rows = all_rows(tmp_path / "after")
    assert set(before["key"]) < set(rows["key"])
    assert rows["key"].is_unique
    assert set(rows[rows["family"] == "norm"].groupby("cache").size()) == {3}
    steps = rows[rows["family"] == "iteration"]
    assert dict(steps[steps["repeat"] == 0]["status"].value_counts()) == {"ok": 2, "error": 1}
    assert list(steps[steps["repeat"] == 1]["status"]) == ["ok"]
    assert re.search(r"iteration: 1 retests, median \d", said)
    assert re.search(r"iteration error: .* 1$", said, re.MULTILINE)  # the graph


@pytest.mark.slow
def test_a_campaign_that_is_ended_brings_home_what_it_had(tmp_path: Path, prepared: Path) -> None:
    """SIGTERM in the middle of a stage; the next run goes on from the archive."""
    box, root = tmp_path / "one.tar.gz", tmp_path / "a"
    run = start(root, prepared, "--part", "ops", "--budget", "5m", "--archive", box)
    end = time.monotonic() + 60
    while time.monotonic() < end and not any(
        path.stat().st_size > 20_000 for path in (root / ".journal").glob("*-t0-r1.jsonl")
    ):
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=30)[0]
    assert run.returncode == 1
    assert "ops: stopped by Stopped" in said
    unpack(box, tmp_path / "home")
    before = all_rows(tmp_path / "home")
    assert len(before) > 5, said
    assert not list((tmp_path / "home/.journal").glob("*.jsonl"))  # all compacted
    line = ("--part", "ops", "--budget", "100s", "--from", box)
    said = finished(start(tmp_path / "b", prepared, *line, points=2))
    rows = all_rows(tmp_path / "b")
    assert set(before["key"]) < set(rows["key"]), said
    assert set(rows["family"]) > {"host", "gemm", "norm"}
    assert rows["key"].is_unique


@pytest.mark.slow
def test_the_same_points_on_another_gpu(tmp_path: Path, prepared: Path) -> None:
    """Plan unseen measures the points of the file --prepare wrote, and iterations."""
    point: dict[str, Any] = {"family": "gemm", "gpu": "toy", "status": "ok", "repeat": 0}
    frame = pd.DataFrame(
        [{**point, "op": "mm", "m": m, "n": 8, "k": 8, "cache": "warm"} for m in (8, 16, 24)]
    )
    store.write_part(tmp_path / "h", "gemm", "toy", frame, "one")
    assert write_measured_points(tmp_path / "h", "toy", prepared / "points-unseen.json") == 3
    finished(start(tmp_path / "a", prepared, "--plan", "unseen", "--budget", "100s"))
    rows = all_rows(tmp_path / "a")
    assert set(rows["family"]) == {"gemm", "iteration"}
    assert set(rows.loc[rows["family"] == "gemm", "m"]) == {8, 16, 24}
    assert (tmp_path / "a.tar.gz").is_file()


@pytest.mark.slow
def test_the_second_campaign_in_two_runs(tmp_path: Path, prepared: Path) -> None:
    """Hosts in rounds, here two; products alone and sustained; ops in steps, then alone; copies."""
    small: dict[str, list[Any]] = {
        "gemm": [Gemm(m=n, n=8, k=8) for n in (8, 16)],
        "optimizer": [OptimizerOp(op="_foreach_mul_", tensors=2, numel=64)],
    }
    write_points(prepared / "points-second.json", small)
    one, plan = tmp_path / "one.tar.gz", ("--plan", "second", "--budget", "10m")
    line = (*plan, "--part", "hosts,products", "--archive", one)
    said = finished(start(tmp_path / "a", prepared, *line, points=3), WHOLE_S)
    unpack(one, tmp_path / "home")
    steps = store.read_rows([tmp_path / "home"], "iteration")
    assert steps.groupby("repeat")["timing"].apply(sorted).to_dict() == {
        repeat: ["back_to_back", "synchronised"] for repeat in range(2)
    }, said
    assert (steps["status"] == "ok").all() and (steps["cores"] > 0).all()
    assert steps["run_id"].nunique() == 2  # a process for each round
    held = store.read_rows([tmp_path / "home"], "sustained")
    assert sorted(held["m"]) == [8, 16] and (held["status"] == "ok").all(), held["reason"]
    assert sorted(store.read_rows([tmp_path / "home"], "gemm")["m"].unique()) == [8, 16]

    more = ("--part", "optimizers,traces,transfers", "--from", one)
    said = finished(start(tmp_path / "b", prepared, *plan, *more), WHOLE_S)
    root = tmp_path / "b"
    inside = store.read_rows([root], "in_step_ops")
    assert inside[inside["of"] == "gemm"]["calls"].sum() == 8, said  # 3 forward, 5 backward
    assert set(inside["timer"]) == {"in_step"}
    alone = store.read_rows([root], "gemm")
    keys = ["op", "m", "n", "k", "layout"]
    assert set(inside[inside["of"] == "gemm"][keys].itertuples(index=False)) <= set(
        alone[keys].itertuples(index=False)
    )
    copies = store.read_rows([root], "transfer")
    assert {"h2d", "d2h", "d2d", "all_reduce"} <= set(copies["op"])
    assert (copies[copies["op"] == "d2d"]["status"] == "ok").all()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--part=ops,sweep",
            "part 'sweep': stages of plan first are smoke, ops, iterations, second",
        ),
        ("--budget=soon", "'soon': expected a duration like 20ms, 90s, 10m or 1h"),
        ("--points=x.json", "not a file of points"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    words: str,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_atomic(tmp_path / "x.json", json.dumps({"gemm": [{"q": 1}]}).encode())
    monkeypatch.setattr("sys.argv", ["campaign", "--out", "a", words])
    with pytest.raises(SystemExit, match="2"):
        campaign.main()
    assert told in caplog.text + capsys.readouterr().err
