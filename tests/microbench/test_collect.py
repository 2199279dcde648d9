"""A real sweep of a few seconds on this CPU: budget, resume, kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from microbench import store
from microbench.collect import collect
from microbench.ops.collective import OPS
from microbench.timing import summarise


def test_summary_is_median_and_nearest_rank_percentiles() -> None:
    timing = summarise([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert timing.time_us == 3.5
    assert (timing.time_us_p20, timing.time_us_p80) == (2.0, 5.0)  # ranks 1 and 4 of 0..5


def test_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match="unknown family 'gem'; known: "):
        collect(Path("unused"), "cpu", ["gem"], 1.0)


def without_captures(root: Path, *names: str) -> None:
    """No points of captured models: capturing takes half a minute."""
    store.write_atomic(
        root / ".journal" / "points-cpu-0.json", json.dumps({name: [] for name in names}).encode()
    )


def test_collectives_are_swept_by_two_ranks(tmp_path: Path) -> None:
    without_captures(tmp_path, "collective")
    assert collect(tmp_path, "cpu", ["collective"], 12.0) > 10
    rows = store.read_rows([tmp_path], "collective")
    assert set(rows["status"]) == {"ok"}
    assert set(rows["world_size"]) == set(rows["ranks_per_node"]) == {2}
    assert set(rows["op"]) <= set(OPS)
    assert len(set(rows["op"])) >= 3
    large = rows[rows["message_bytes"] > 2**24]["time_us"]
    small = rows[rows["message_bytes"] < 2**14]["time_us"]
    assert large.median() > 3 * small.median()


def test_a_killed_sweep_resumes_and_repeats_nothing(tmp_path: Path) -> None:
    without_captures(tmp_path, "gemm")
    script = (
        "from pathlib import Path; from microbench.collect import collect;"
        f"collect(Path({str(tmp_path)!r}), 'cpu', ['gemm'], 30.0)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        journals = list((tmp_path / ".journal").glob("*.jsonl"))
        if journals and journals[0].stat().st_size > 5000:
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = {r["key"] for p in journals for r in store.read_journal(p)}
    assert finished
    collect(tmp_path, "cpu", ["gemm"], 4.0)
    keys = list(store.read_rows([tmp_path], "gemm")["key"])
    assert finished <= set(keys)
    assert len(keys) == len(set(keys))
    assert set(store.read_rows([tmp_path], "gemm")["cache"]) == {"warm", "cold"}
    assert collect(tmp_path, "cpu", ["gemm"], 0.5) == 0  # the budget is spent: nothing to do
