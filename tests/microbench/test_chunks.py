"""Sweeps in chunks on a device of clockwork: rows, failures, sticky errors, budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clockwork import Clockwork, Killed, Toy, order, toy_family

from microbench import chunk_worker, store
from microbench import sweep as sweep_module
from microbench.ops import families
from microbench.ops.gemm import FAMILY as GEMM


def work(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    points: Sequence[Toy],
    device: Clockwork | None = None,
) -> list[dict[str, Any]]:
    """One worker over the points; all rows the journal has then."""
    device = device or Clockwork()
    known = {"toy": toy_family(device, points), "gemm": fixed(GEMM)}
    monkeypatch.setattr(chunk_worker, "families", lambda: known)
    monkeypatch.setattr(sweep_module, "families", lambda: known)
    asked = order(root, "toy")
    sweep = sweep_module.Sweep(asked, sweep_module.finished_keys(root, ("toy",)))
    journal = store.Journal(root, "run")
    try:
        chunk_worker.sweep_in_chunks(sweep, device, journal)
    finally:
        journal.close()
        rows = store.read_journal(root / ".journal" / "run.jsonl")
    return rows


def fixed(family: Any) -> Any:
    """The anchor's family, building nothing."""
    from dataclasses import replace

    from microbench.ops.family import Workload

    return replace(family, build=lambda p, device: Workload(run=lambda: 7.0))


def statuses(rows: list[dict[str, Any]]) -> dict[int, str]:
    """Status by point."""
    return {row["number"]: row["status"] for row in rows}


def test_a_chunk_gives_cold_and_warm_rows_and_waits_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Clockwork(reading={"sm_clock_hz": 1e9, "throttle": "power_cap", "energy_j": 2.0})
    rows = work(tmp_path, monkeypatch, [Toy(number=n) for n in range(1, 61)], device)
    first = {row["cache"]: row for row in rows if row["number"] == 9}
    assert first["warm"]["time_us"] == 9.0
    assert first["cold"]["time_us"] == 109.0
    assert first["warm"]["kernel_count"] == 2
    assert first["warm"]["kernel_us"] == 5.0
    assert first["warm"]["kernels"] == "toy_kernel"
    assert first["warm"]["launch_us"] == 5.0
    assert first["warm"]["drift_us"] == 7.0
    assert first["warm"]["energy_j"] == 0.0
    assert first["warm"]["throttle"] == "power_cap"
    assert {row["status"] for row in rows} == {"ok"}
    assert len({row["key"] for row in rows}) == len(rows) == 2 * 60
    assert device.waits < 12  # whatever the number of points


def test_heat_marks_rows_and_a_power_cap_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = Clockwork(reading={"throttle": "power_cap sw_thermal"})
    assert statuses(work(tmp_path, monkeypatch, [Toy(number=1)], hot)) == {1: "throttled"}
    cool = Clockwork(reading={"throttle": "power_cap"})
    again = work(tmp_path, monkeypatch, [Toy(number=1), Toy(number=2)], cool)
    assert [r["status"] for r in again if r["number"] == 1] == 2 * ["throttled"] + 2 * ["ok"]


def test_points_that_fail_are_rows_and_disturb_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [Toy(number=1), Toy(number=2, does="oom"), Toy(number=3, does="unsupported")]
    device = Clockwork()
    rows = work(tmp_path, monkeypatch, points, device)
    assert statuses(rows) == {1: "ok", 2: "oom", 3: "unsupported"}
    assert device.resets == 2  # beside the others and then alone
    assert rows[-1]["number"] == 2 and "out of memory" in rows[-1]["reason"]
    assert work(tmp_path, monkeypatch, points) == rows  # a second sweep has nothing to do


@pytest.mark.parametrize("big", ["big", "huge"])
def test_what_does_not_fit_beside_others_is_measured_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: str
) -> None:
    """A second big one is not even tried; a huge one is tried beside 80 others, in vain."""
    device = Clockwork()
    points = [Toy(number=n, does="ok" if n < 81 else big) for n in range(1, 83)]
    rows = work(tmp_path, monkeypatch, points, device)
    assert set(statuses(rows).values()) == {"ok"}
    assert len(rows) == 2 * 82
    assert (device.resets > 0) == (big == "huge")
    assert device.held == 0


@pytest.mark.parametrize("does", ["sticky", "late"])
def test_after_a_sticky_error_only_the_culprit_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    points = [Toy(number=n, does=does if n == 4 else "ok") for n in range(1, 8)]
    ends = 0
    for _ in range(5):
        try:
            rows = work(tmp_path, monkeypatch, points)  # a new process has a new device
            break
        except SystemExit as exc:
            assert exc.code == chunk_worker.EXIT_BROKEN
            ends += 1
    assert ends == 2  # once in the chunk and once alone
    assert statuses(rows) == {n: "error" if n == 4 else "ok" for n in range(1, 8)}
    assert len({row["key"] for row in rows}) == len(rows) == 2 * 6 + 1


def test_a_point_that_kills_the_worker_without_a_word_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [Toy(number=n, does="kill" if n == 2 else "ok") for n in range(1, 5)]
    for deaths in range(3):
        with pytest.raises(Killed):
            work(tmp_path, monkeypatch, points)
        assert deaths < 3
    rows = work(tmp_path, monkeypatch, points)
    assert statuses(rows) == {1: "ok", 2: "error", 3: "ok", 4: "ok"}
    assert [r["reason"] for r in rows if r["status"] == "error"] == ["the worker died on it"]


def test_families_get_the_same_share_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One family's points cost ten times as much: it gets a tenth of the points."""
    device = Clockwork()
    known = {
        n: toy_family(device, [Toy(number=i) for i in range(500)], n) for n in ("cheap", "dear")
    }
    monkeypatch.setattr(sweep_module, "families", lambda: known)
    sweep = sweep_module.Sweep(order(tmp_path, "cheap", "dear"), set())
    for _ in range(4):
        chosen = chunk_worker.choose_chunk(sweep, 0.0)
        cost_s = {"cheap": 0.01, "dear": 0.1}
        sweep.settle(
            [{"family": f.name, "cost_s": cost_s[f.name], "cache": "warm"} for f, *_ in chosen]
        )
    assert sweep.points["cheap"] == pytest.approx(10 * sweep.points["dear"], rel=0.3)
    sweep.order = order(tmp_path, "cheap", "dear", budget_s=0.5)
    assert len(chunk_worker.choose_chunk(sweep, 0.0)) < 60  # 0.5 s at 0.01 s a point or more


def test_nothing_is_left_of_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Clockwork()
    known = {"toy": toy_family(device, [Toy(number=1)]), "gemm": fixed(GEMM)}
    monkeypatch.setattr(chunk_worker, "families", lambda: known)
    monkeypatch.setattr(sweep_module, "families", lambda: known)
    sweep = sweep_module.Sweep(order(tmp_path, "toy", budget_s=0.0), set())
    journal = store.Journal(tmp_path, "run")
    chunk_worker.sweep_in_chunks(sweep, device, journal)
    assert not store.read_journal(tmp_path / ".journal" / "run.jsonl")
    assert "gemm" in families()


def test_a_family_of_weight_three_gets_three_points_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU; on a GPU every family gets the same time."""
    device = Clockwork()
    points = [Toy(number=i) for i in range(100)]
    known = {n: toy_family(device, points, n) for n in ("plain", "rich")}
    known["rich"] = replace(known["rich"], weight=3.0)
    monkeypatch.setattr(sweep_module, "families", lambda: known)
    monkeypatch.setattr(sweep_module.Sweep, "_stream", lambda self, name: iter(points))
    counts = {}
    for where in ("cpu", "cuda"):
        asked = replace(order(tmp_path, "plain", "rich"), device=where)
        sweep = sweep_module.Sweep(asked, set())
        for _ in range(40):
            family, *_ = sweep.choose(0.0) or pytest.fail("ran dry")
            sweep.settle([{"family": family.name, "cost_s": 0.1, "cache": "warm"}])
        counts[where] = sweep.points["rich"]
    assert counts == {"cpu": 30, "cuda": 20}
