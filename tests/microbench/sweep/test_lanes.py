"""Several GPUs of a node at once: one worker each, points shared, rows and cards name machines."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from clockwork import order
from rich.console import Console

from itercast.capture.base.files import write_atomic
from itercast.extras.benchmarks.gpu_report import machines_table
from itercast.extras.campaign.archive import pack, unpack
from itercast.microbench import store
from itercast.microbench.processes.lanes import LaneStopped, gpu_count, run_lanes
from itercast.microbench.sweep.orders import phases
from itercast.microbench.sweep.rows import make_row
from itercast.microbench.sweep.scheduler import Sweep

ROOT = Path(__file__).parents[3]


def measured_on(root: Path, host: str, uuid: str, name: str, anchor_us: float = 10.0) -> None:
    """Four rows of a GPU of kind toy, in a journal that was compacted."""
    row = {"family": "gemm", "gpu": "toy", "status": "ok", "host": host, "gpu_uuid": uuid}
    journal = store.Journal(root, name)
    journal.append(
        [{**row, "key": f"{name}{n}", "gpu_index": 0, "drift_us": anchor_us + n} for n in range(4)]
    )
    journal.close()
    store.compact(root, {"what": "test", "when": "2026-01-02", "versions": {"driver": host}})


@pytest.mark.slow
def test_two_gpus_share_the_points_of_a_sweep(tmp_path: Path) -> None:
    """Twelve points of a family, each measured once, on either GPU; host times by one worker."""
    words = ("collect", "--device", "cuda", "--devices", "all", "--budget", "100s", "--out")
    families = ("--family", "norm", "--family", "gemm", "--family", "host")
    (tmp_path / ".journal").mkdir()  # nothing is to be captured
    write_atomic(
        tmp_path / ".journal/points-cuda-0.json", b'{"models": 40, "norm": [], "gemm": []}'
    )
    run = subprocess.run(
        [sys.executable, "-m", "itercast", *words, str(tmp_path), *families],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'tests/standin'}:{ROOT}",
            "STANDIN_GPUS": "2",
            "STANDIN_POINTS": "12",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr
    rows = pd.concat([store.read_rows([tmp_path], n) for n in ("norm", "gemm")])
    assert rows["key"].is_unique and set(rows.groupby("family")["key"].count()) == {24}
    where = set(zip(rows["gpu_uuid"], rows["gpu_index"], strict=True))
    assert where == {("standin-0", 0), ("standin-1", 1)}
    assert set(store.read_rows([tmp_path], "host")["gpu_uuid"]) == {"standin-0"}
    card = yaml.safe_load((tmp_path / "norm/standin/itercast/card.yaml").read_text())
    assert {m["gpu_uuid"] for m in card["machines"]} == {"standin-0", "standin-1"}
    assert sum(m["rows"] for m in card["machines"]) == 24


def test_host_times_have_one_lane_and_each_key_belongs_to_one() -> None:
    lanes = {p.families: p.lanes for p in phases("cuda", ("norm", "host"), devices=2)}
    assert lanes == {("host",): 1, ("norm",): 2}
    both = [replace(order(Path(), "norm"), lanes=2, lane=lane) for lane in (0, 1)]
    assert [Sweep(one, set()).is_of_this_lane("a0") for one in both] == [True, False]
    assert [Sweep(one, set()).is_of_this_lane("a1") for one in both] == [False, True]
    second = [
        replace(one, among=(1, 3)) for one in both
    ]  # lanes 2 and 3 of the six of three sweeps
    keys = [f"{n:x}" for n in range(12)]
    found = [[int(k, 16) for k in keys if Sweep(one, set()).is_of_this_lane(k)] for one in second]
    assert found == [[2, 8], [3, 9]]


def test_archives_of_two_machines_lose_no_card(tmp_path: Path) -> None:
    """The card of the first stays, and both machines are named with their software."""
    for name in ("a", "b"):
        measured_on(tmp_path / name, f"node-{name}", f"uuid-{name}", f"run-{name}")
        pack(tmp_path / name, tmp_path / f"{name}.tar.gz")
        unpack(tmp_path / f"{name}.tar.gz", tmp_path / "home")
    card = yaml.safe_load((tmp_path / "home/gemm/toy/itercast/card.yaml").read_text())
    seen = [(m["host"], m["versions"]["driver"], m["rows"]) for m in card["machines"]]
    assert seen == [("node-a", "node-a", 4), ("node-b", "node-b", 4)]
    assert card["rows"] == {"ok": 8} and len(card["sha256"]) == 2
    (tmp_path / "home/gemm/toy/itercast/card.yaml").unlink()
    store.write_card(tmp_path / "home/gemm/toy/itercast")  # from the parts alone
    assert yaml.safe_load((tmp_path / "home/gemm/toy/itercast/card.yaml").read_text()) == card


def test_the_slow_one_of_three_gpus_is_named(tmp_path: Path) -> None:
    """Anchors of 10 to 13 us and of 20 to 23 us: medians 11.5 and 21.5, 87 % apart."""
    for host, anchor_us in (("a", 10.0), ("b", 10.0), ("c", 20.0)):
        measured_on(tmp_path, host, f"uuid-{host}", host, anchor_us)
    table = machines_table(tmp_path, "toy")
    assert table is not None
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table)
    found = [line for line in shown.get().splitlines() if "uuid-" in line]
    lines = {line.split("│")[1].strip(): line for line in found}
    assert "slow" in lines["c"] and "+87.0" in lines["c"]
    assert "slow" not in lines["a"] + lines["b"]
    assert machines_table(tmp_path, "other") is None


def test_rows_of_a_cpu_name_the_host(tmp_path: Path) -> None:
    row = make_row(
        order(tmp_path, "toy"), family="toy", params={}, repeat=0, key="", timer="", measured={}
    )
    assert row["host"] == os.uname().nodename and "gpu_uuid" not in row


def test_lanes_show_their_progress_and_end_together() -> None:
    shown: list[list[int]] = []
    ended = []

    def run(lane: int, tell: object) -> int:
        try:
            while True:
                tell(lane)  # type: ignore[operator]
                time.sleep(0.05)
        except LaneStopped:
            ended.append(lane)
            raise

    def show(values: list[int]) -> None:
        shown.append(sorted(values))
        if len(values) == 2:
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_lanes(2, run, show)
    assert shown[-1] == [0, 1] and sorted(ended) == [0, 1] and threading.active_count() <= before


@pytest.mark.parametrize("text", ["0", "two", "-1", "99", ""])
def test_wrong_numbers_of_devices_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="devices"):
        gpu_count(text, "cuda")
    with pytest.raises(ValueError, match="only GPUs"):
        gpu_count("all", "cpu")
