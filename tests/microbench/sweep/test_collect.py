"""A real sweep of a few seconds on this CPU: budget, resume, kill -9."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from clockwork import order
from full_disk import full_disk

from itercast.capture.base.files import write_atomic
from itercast.microbench import store
from itercast.microbench.ops.step.collective import OPS
from itercast.microbench.processes.ranks import threads_of
from itercast.microbench.sweep import collect as collect_module
from itercast.microbench.sweep.collect import collect, measure_points
from itercast.microbench.sweep.orders import Phase, WorkerOrder, phases
from itercast.microbench.timing.clock import summarise


def test_summary_is_median_and_nearest_rank_percentiles() -> None:
    timing = summarise([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert timing.time_us == 3.5
    assert (timing.time_us_p20, timing.time_us_p80) == (2.0, 5.0)  # ranks 1 and 4 of 0..5


def test_means_add_up_and_medians_do_not() -> None:
    """Nine ops that take 10 us, and 14 in a third of the steps, three of them in each.

    A step takes 6 * 10 + 3 * 14 us, their medians are 9 * 10. What took
    more than twice the median counts as twice the median.
    """
    ops = [[10.0, 10.0, 14.0][i % 3 :] + [10.0, 10.0, 14.0][: i % 3] for i in range(9)]
    steps_us = [sum(samples) for samples in zip(*ops, strict=True)]
    assert steps_us == [102.0, 102.0, 102.0]
    assert sum(summarise(samples).time_us_mean for samples in ops) == pytest.approx(102.0)
    assert sum(summarise(samples).time_us for samples in ops) == 90.0
    assert summarise([10.0, 10.0, 4000.0]).time_us_mean == pytest.approx((10 + 10 + 20) / 3)
    assert summarise([-4.0, 2.0, 3.0]).time_us_mean == pytest.approx((0 + 2 + 3) / 3)
    assert summarise([-4.0, -1.0, 3.0]).time_us_mean == -1.0


def test_phases_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's host first and alone, in a process that never profiles: a twentieth of the time.

    Collectives in groups of all sizes; a CPU's among two and four ranks: four may share cores, and
    no formula of latency and rate says what that costs.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    first, rest = phases("cuda", ("gemm", "host", "norm", "collective"))
    assert (first.families, rest.families) == (("host",), ("gemm", "norm"))
    assert first.share == pytest.approx(0.05 / 0.9)
    for gpus, nodes, groups in (
        (1, False, []),
        (8, False, [2, 4, 8]),
        (6, False, [2, 4, 6]),
        (8, True, [8]),
        (1, True, [1]),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        found = phases("cuda", ["gemm", "collective"], nodes)
        assert sum(p.share for p in found) == pytest.approx(1)
        assert [p.ranks for p in found if p.families == ("collective",)] == groups
    found = phases("cpu", ("gemm", "collective"))
    shares = {p.ranks: p.share for p in found if p.families == ("collective",)}
    shared = 0.46 + (0.34 if threads_of(1) > 1 else 0) + 2 * 0.1
    assert shares == {n: pytest.approx(0.1 / shared) for n in (2, 4)}


@pytest.mark.parametrize("points", [False, True])
def test_progress_is_that_of_all_phases(
    points: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cores, then one by one: of 2 s a phase tells 3 rows at its middle and 5 at its end."""
    now_s, told = [100.0], list[tuple[int, float]]()

    def work(order: WorkerOrder, progress: Callable[[int, float], None]) -> None:
        for rows in (3, 5):
            now_s[0] += order.budget_s / 2
            progress(rows, 0.5)

    for name, fake in (
        ("card_facts", lambda *_: {"hardware": {"name": "toy", "contention": 1.0}}),
        ("run_workers", work),
        ("run_worker", work),
        ("unspent", lambda *_: [1.0, 1.0]),
        ("check_points", lambda _: None),
    ):
        monkeypatch.setattr(collect_module, name, fake)
    halves = [Phase(families=("gemm",), threads=n, share=0.5) for n in (2, 1)]
    monkeypatch.setattr(collect_module, "phases", lambda *_: halves)
    moved = iter([5, 5] if points else [0, 5, 5])
    monkeypatch.setattr(collect_module.store, "compact", lambda *_: next(moved))
    clock = SimpleNamespace(monotonic=lambda: now_s[0], strftime=str, monotonic_ns=int)
    monkeypatch.setattr(collect_module, "time", clock)
    (tmp_path / "points.json").write_text('{"gemm": [1]}')
    show = lambda rows, frac: told.append((rows, round(frac, 6)))  # noqa: E731
    if points:
        measure_points(tmp_path, "cpu", tmp_path / "points.json", 2.0, progress=show)
    else:
        monkeypatch.setattr(collect_module, "USUAL_START_S", 0.0)
        collect(tmp_path, "cpu", ["gemm"], 2.0, progress=show)
    assert told == [(3, 0.25), (5, 0.5), (8, 0.75), (10, 1.0)]


def test_each_sweep_of_a_cpu_measures_contention_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 before and 2.88 now: 2.4, their geometric mean; where nothing is known, 2.88."""
    told = list[float]()

    def work(order: WorkerOrder, progress: object) -> bool:
        told.append(order.hardware["contention"])
        return True

    for before in (2.0, 0.0):
        for name, fake in (
            ("card_facts", lambda *_, x=before: {"hardware": {"name": "toy", "contention": x}}),
            ("measure_contention", lambda: 2.88),
            ("threads_of", lambda _: 2),
            ("run_workers", work),
            ("unspent", lambda _root, _facts, asked, *_: [1.0] * len(asked)),
        ):
            monkeypatch.setattr(collect_module, name, fake)
        collect(tmp_path, "cpu", ["collective"], 1.0)
    assert told == [2.4, 2.4, 2.88, 2.88]


def test_workers_that_bring_nothing_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where an import fails: not twenty starts of ten seconds each."""
    starts = []

    def start(order: WorkerOrder) -> subprocess.Popen[bytes]:
        starts.append(order)
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])

    monkeypatch.setattr(collect_module, "start_worker", start)
    assert not collect_module.run_worker(
        replace(order(tmp_path, "toy", budget_s=60.0), device="cuda")
    )
    assert len(starts) == 3
    assert "the sweep of toy ends: its workers return no rows" in caplog.text


@pytest.mark.parametrize(("ends", "raises"), [("raise SystemExit(1)", True), ("", False)])
def test_a_sweep_whose_workers_all_fail_without_a_row_fails(
    ends: str, raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with "0 new rows" and exit code 0; a sweep that has nothing left to do is fine."""
    facts = {"hardware": {"name": "toy", "contention": 1.0}}
    monkeypatch.setattr(collect_module, "card_facts", lambda *_: facts)
    run = lambda _: subprocess.Popen([sys.executable, "-c", ends])  # noqa: E731
    monkeypatch.setattr(collect_module, "start_worker", run)
    fails = pytest.raises(OSError, match="its workers failed")
    with fails if raises else nullcontext():
        assert collect(tmp_path, "cpu", ["gemm"], 60.0) == 0


def test_a_worker_that_outlives_its_budget_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its points were not at fault: the next worker does not suspect them."""
    suspects = tmp_path / ".journal/pending-toy.json"
    suspects.parent.mkdir()
    suspects.write_text("{}")
    sleeper = "import time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", sleeper])
    monkeypatch.setattr(collect_module, "start_worker", lambda order: process)
    asked = replace(order(tmp_path, "toy", budget_s=0.5), device="cuda", begin_s=time.monotonic())
    collect_module.run_worker(asked, None, grace_s=0.3)
    assert process.returncode == -signal.SIGKILL
    assert not suspects.exists()


def without_captures(root: Path, *names: str) -> None:
    """No points of captured models: capturing takes half a minute."""
    write_atomic(
        root / ".journal" / "points-cpu-0.json", json.dumps({name: [] for name in names}).encode()
    )


@pytest.mark.slow
def test_collectives_are_swept_by_two_and_by_four_ranks_and_by_pairs_of_four(
    tmp_path: Path,
) -> None:
    without_captures(tmp_path, "collective")
    assert collect(tmp_path, "cpu", ["collective"], 60.0) > 6
    rows = store.read_rows([tmp_path], "collective")
    assert set(rows["status"]) == {"ok"}
    groups = set(zip(rows["world_size"], rows["ranks_per_node"], strict=True))
    assert groups == {(2, 2), (4, 4), (2, 4)}
    assert set(rows["op"]) <= set(OPS)
    assert len(set(rows["op"])) >= 3


def test_a_killed_sweep_resumes_and_repeats_nothing(
    tmp_path: Path, known_cpu: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    without_captures(tmp_path, "gemm")
    known_cpu(tmp_path)
    script = (
        "from pathlib import Path; from itercast.microbench.sweep.collect import collect;"
        f"collect(Path({str(tmp_path)!r}), 'cpu', ['gemm'], 300.0)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    deadline = time.monotonic() + 120
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
    assert "took its budget of 0.5 s already, a larger one goes on" in caplog.text


def test_a_sweep_whose_disk_is_full_ends_with_one_line_and_keeps_its_rows(
    tmp_path: Path, known_cpu: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """It went on to the end of its budget, printed tracebacks, and ended as if all were well."""
    without_captures(tmp_path, "gemm")
    known_cpu(tmp_path)
    full = f"File too large; rows measured so far are kept.*: '{tmp_path}'"
    with full_disk(10_000), pytest.raises(OSError, match=full):
        collect(tmp_path, "cpu", ["gemm"], 60.0)
    assert "Traceback" not in capfd.readouterr().err
    (journal,) = (tmp_path / ".journal").glob("*.jsonl")
    finished = {r["key"] for r in store.read_journal(journal)}
    assert finished
    collect(tmp_path, "cpu", ["gemm"], 0.5)
    assert set(store.read_rows([tmp_path], "gemm")["key"]) == finished
