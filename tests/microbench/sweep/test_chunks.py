"""Sweeps in chunks on a device of clockwork: rows, failures, sticky errors, budgets."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clockwork import HARDWARE, Clockwork, Killed, Toy, order, toy_family

from itercast.microbench import store
from itercast.microbench.ops.family import GpuSweep, Workload
from itercast.microbench.ops.matrix.gemm import FAMILY as GEMM
from itercast.microbench.processes.virtual_cores import VirtualCores
from itercast.microbench.processes.watch import EXIT_BROKEN
from itercast.microbench.sweep import gpu_chunks, worker
from itercast.microbench.sweep import scheduler as sweep_module
from itercast.microbench.sweep.cpu_chunks import CpuBench
from itercast.microbench.sweep.gpu_chunks import GpuBench
from itercast.microbench.sweep.under_way import UnderWay
from itercast.microbench.timing.clock import Anchor

Rows = list[dict[str, Any]]
Work = Callable[..., Rows]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Runs one worker over toys; returns all rows that the journal has then."""

    def run(
        points: Sequence[Toy], device: Clockwork | None = None, **asked: Any
    ) -> list[dict[str, Any]]:
        device = device or Clockwork()
        know(monkeypatch, {"toy": toy_family(device, points), "gemm": fixed(GEMM)})
        done = sweep_module.finished_keys(tmp_path, ("toy",))
        return measured(sweep_module.Sweep(order(tmp_path, "toy", **asked), done), device)

    return run


def know(monkeypatch: pytest.MonkeyPatch, known: dict[str, Any]) -> None:
    """Only these families exist."""
    for module in (gpu_chunks, sweep_module):
        monkeypatch.setattr(module, "families", lambda: known)


def measured(sweep: sweep_module.Sweep, device: Clockwork, name: str = "run") -> Rows:
    """All rows of a journal, to which a worker has added its own."""
    root = Path(sweep.order.root)
    journal = store.Journal(root, name)
    under_way = UnderWay(sweep)
    try:
        worker.measure(sweep, GpuBench(sweep, under_way, device), under_way, journal)
    finally:
        journal.close()
    return store.read_journal(root / ".journal" / f"{name}.jsonl")


def fixed(family: Any) -> Any:
    """The anchor's family, building nothing."""
    return replace(family, build=lambda p, device: Workload(run=lambda: 7.0))


def statuses(rows: Rows) -> dict[int, str]:
    """Status by point."""
    return {row["number"]: row["status"] for row in rows}


def test_a_chunk_gives_cold_and_warm_rows(work: Work) -> None:
    """What lies between two events with nothing in between, 1.5 us, is in no time of a row."""
    device = Clockwork(reading={"sm_clock_hz": 1e9, "throttle": "power_cap", "energy_j": 2.0})
    rows = work([Toy(number=n) for n in range(1, 61)], device)
    first = {row["cache"]: row for row in rows if row["number"] == 9}
    assert first["warm"]["time_us"] == 9.0
    assert first["cold"]["time_us"] == 109.0
    assert first["warm"]["empty_us"] == 1.5
    assert first["warm"]["gap_us"] == pytest.approx(0.5)  # (50 * 2 + 49 * 0.5 - 50 * 2) / 49
    assert first["warm"]["tiny_launch_us"] == 5.0
    assert first["warm"]["launch_us"] >= 0.5  # 5 less what torch.ops.aten costs here
    assert first["warm"]["drift_us"] == 7.0
    assert first["warm"]["kernel_count"] == 2
    assert first["warm"]["kernel_us"] == 5.0
    assert first["warm"]["kernels"] == "toy_kernel"
    assert first["warm"]["energy_j"] == 0.0
    assert first["warm"]["throttle"] == "power_cap"
    assert first["warm"]["sm_clock_hz_min"] == 1e9
    assert {row["status"] for row in rows} == {"ok"}
    assert {(row["starved"], row["synchronises"]) for row in rows} == {(False, False)}
    assert len({row["key"] for row in rows}) == len(rows) == 2 * 60


def test_heat_marks_rows_and_a_power_cap_does_not(work: Work) -> None:
    hot = Clockwork(reading={"throttle": "power_cap sw_thermal"})
    assert statuses(work([Toy(number=1)], hot)) == {1: "throttled"}
    cool = Clockwork(reading={"throttle": "power_cap"})
    again = work([Toy(number=1), Toy(number=2)], cool)
    assert [r["status"] for r in again if r["number"] == 1] == 2 * ["throttled"] + 2 * ["ok"]


def test_points_that_fail_are_rows_and_disturb_nobody(work: Work) -> None:
    points = [Toy(number=1), Toy(number=2, does="oom"), Toy(number=3, does="unsupported")]
    device = Clockwork()
    rows = work(points, device)
    assert statuses(rows) == {1: "ok", 2: "oom", 3: "unsupported"}
    assert device.resets == 2  # beside the others and then alone
    assert rows[-1]["number"] == 2 and "out of memory" in rows[-1]["reason"]
    assert work(points) == rows  # a second sweep has nothing to do


@pytest.mark.parametrize("big", ["big", "huge"])
def test_what_does_not_fit_beside_others_is_measured_alone(work: Work, big: str) -> None:
    """A second big one is not even tried; a huge one is tried beside 80 others, in vain."""
    device = Clockwork()
    points = [Toy(number=n, does="ok" if n < 81 else big) for n in range(1, 83)]
    rows = work(points, device)
    assert set(statuses(rows).values()) == {"ok"}
    assert len(rows) == 2 * 82
    assert (device.resets > 0) == (big == "huge")
    assert device.held == 0


@pytest.mark.parametrize("does", ["sticky", "late"])
def test_after_a_sticky_error_only_the_culprit_is_marked(work: Work, does: str) -> None:
    """The device is waited for after each point, so that one worker is enough to know which."""
    points = [Toy(number=n, does=does if n == 4 else "ok") for n in range(1, 8)]
    with pytest.raises(SystemExit) as ended:
        work(points)
    assert ended.value.code == EXIT_BROKEN
    rows = work(points)  # a new process has a new device
    assert statuses(rows) == {n: "error" if n == 4 else "ok" for n in range(1, 8)}
    assert len({row["key"] for row in rows}) == len(rows) == 2 * 6 + 1


def test_a_point_that_kills_the_worker_without_a_word_is_found_out_at_once(work: Work) -> None:
    points = [Toy(number=n, does="kill" if n == 2 else "ok") for n in range(1, 5)]
    with pytest.raises(Killed):
        work(points)
    rows = work(points)
    assert statuses(rows) == {1: "ok", 2: "error", 3: "ok", 4: "ok"}
    assert [r["reason"] for r in rows if r["status"] == "error"] == ["its worker process died"]


def test_a_point_that_kills_the_worker_of_a_cpu_is_found_out_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real clocks; the journal of the first worker has no row, as all points are one chunk."""
    points = [Toy(number=n, does="kill" if n == 2 else "ok") for n in range(1, 4)]
    know(monkeypatch, {"toy": toy_family(Clockwork(name="cpu"), points)})
    asked = replace(order(tmp_path, "toy"), hardware={**HARDWARE, "cold_share": {"0.5": 1.0}})

    def sweep_once() -> None:
        done = sweep_module.finished_keys(tmp_path, ("toy",))
        sweep, journal = sweep_module.Sweep(asked, done), store.Journal(tmp_path, "run")
        under_way = UnderWay(sweep)
        worker.measure(sweep, CpuBench(sweep, under_way), under_way, journal)

    with pytest.raises(Killed):
        sweep_once()
    sweep_once()
    rows = store.read_journal(tmp_path / ".journal/run.jsonl")
    assert statuses(rows) == {1: "ok", 2: "error", 3: "ok"}
    assert sorted(r["cache"] for r in rows if r["status"] == "ok") == 2 * ["cold"] + 2 * ["warm"]


def test_a_cpu_s_speed_is_that_before_and_after_a_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anchors of 100, 121, 100 and 144 us around two warm points and the cold ones.

    A third point is timed again: 100 and 400 us were around it, then 100 and 100 us are.
    """
    told = iter((100.0, 121.0, 100.0, 400.0, 100.0, 100.0, 144.0))
    monkeypatch.setattr(Anchor, "times_us", lambda _: {"anchor_us": next(told), "serial_us": 1.0})
    monkeypatch.setattr(VirtualCores, "settle", lambda _: None)
    points = [Toy(number=n) for n in (1, 2, 3)]
    know(monkeypatch, {"toy": toy_family(Clockwork(name="cpu"), points)})
    asked = replace(order(tmp_path, "toy"), hardware={**HARDWARE, "cold_share": {"0.5": 1.0}})
    sweep = sweep_module.Sweep(asked, set())
    bench = CpuBench(sweep, UnderWay(sweep))
    rows, _ = bench.measure(sweep.choose_chunk(0.0, 3, 1.0), time.monotonic() + 60)
    speeds = {(r["number"], r["cache"]): round(r["anchor_us"]) for r in rows}
    assert [speeds[n, "warm"] for n in (1, 2, 3)] == [110, 110, 100]
    assert [speeds[n, "cold"] for n in (1, 2, 3)] == [120, 120, 120]


def test_a_worker_of_a_later_run_tries_the_point_again(work: Work, tmp_path: Path) -> None:
    """Its parent may have been killed, too; a point at which that happened twice is marked."""
    points = [Toy(number=n, does="kill" if n == 2 else "ok") for n in range(1, 5)]
    for run_id in ("one", "two"):
        with pytest.raises(Killed):
            work(points, run_id=run_id)
        assert not (tmp_path / ".journal" / "run.jsonl").read_bytes()
    rows = work(points, run_id="three")
    assert statuses(rows) == {1: "ok", 2: "error", 3: "ok", 4: "ok"}


def test_a_chunk_of_which_nobody_knows_the_culprit_is_measured_point_by_point(work: Work) -> None:
    """The worker dies after all points of a chunk are sampled, then when the third one is."""
    points = [Toy(number=n, does="poison" if n == 3 else "ok") for n in range(1, 9)]
    for _ in range(2):
        with pytest.raises(Killed):
            work(points)
    rows = work(points)
    assert statuses(rows) == {n: "error" if n == 3 else "ok" for n in range(1, 9)}
    assert len(rows) == 2 * 7 + 1


def test_one_chunk_in_four_is_profiled_each_point_under_its_settings(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuBench, "points", 4)
    device = Clockwork()
    dtypes = ("fp32", "tf32")
    points = [Toy(number=n, dtype=dtypes[n % 2]) for n in range(1, 17)]
    rows = work(points, device)
    assert {row["number"] for row in rows if "kernel_us" in row} == {1, 2, 3, 4}
    assert device.profiled == [("tf32", "tf32"), ("fp32", "fp32")] * 2


def test_a_profiler_that_kills_the_worker_is_not_used_by_the_next(work: Work) -> None:
    points = [Toy(number=n) for n in range(1, 5)]
    with pytest.raises(Killed):
        work(points, Clockwork(profiler="kill"))
    rows = work(points, Clockwork(profiler="kill"))
    assert statuses(rows) == dict.fromkeys(range(1, 5), "ok")


def test_the_host_is_measured_by_a_worker_that_never_profiles(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it measure what a worker of other families left."""
    device = Clockwork(profiler="kill")
    with pytest.raises(Killed):
        work([Toy(number=1), Toy(number=2, does="kill")], device)
    known = {n: toy_family(device, [Toy(number=n == "host")], n) for n in ("host", "toy")}
    known["host"] = replace(known["host"], on_host=True)
    know(monkeypatch, known | {"gemm": fixed(GEMM)})
    rows = measured(sweep_module.Sweep(order(tmp_path, "host"), set()), device, "host")
    assert [(r["family"], r["status"]) for r in rows] == [("toy", "error"), ("host", "ok")]
    assert rows[1]["timer"] == "with_launch"


def test_rows_are_kept_when_the_profiler_breaks_the_device(work: Work) -> None:
    points = [Toy(number=n) for n in range(1, 5)]
    with pytest.raises(SystemExit) as ended:
        work(points, Clockwork(profiler="sticky"))
    assert ended.value.code == EXIT_BROKEN
    assert len(work(points)) == 2 * 4


def test_samples_that_waited_for_the_host_are_dropped(work: Work) -> None:
    """A launch takes 5 us: behind sleeps for 5 and 10 us samples starve, 50 us longer than 9."""
    device = Clockwork()
    rows = work([Toy(number=9, does="slow")], device)
    assert device.sleeps_us == 2 * [5.0, 10.0, *10 * [20.0]]
    assert [(r["time_us"], r["samples"], r["starved"]) for r in rows] == [
        (109.0, 10, False),
        (9.0, 10, False),
    ]
    rows = work([Toy(number=8, does="starved")])
    assert [(r["samples"], r["starved"]) for r in rows[2:]] == 2 * [(20, True)]


def test_nobody_sleeps_for_an_op_that_waits_for_the_device_itself(work: Work) -> None:
    """Launched behind a sleep of 200 us it takes 200 us longer than the 5 + 1.5 + 9 us without."""
    device = Clockwork()
    points = [Toy(number=9, does="synchronises"), Toy(number=4)]
    rows = work(points, device)
    of = {(r["number"], r["cache"]): r for r in rows}
    assert (of[9, "warm"]["synchronises"], of[9, "warm"]["starved"]) == (True, False)
    assert not of[4, "warm"]["synchronises"]
    assert device.sleeps_us == [0.0] * 20 + [5.0] * 20
    assert device.launched.count(9) == 3 + 2  # launches, probes
    assert device.launched.count(4) == 3 + 1


def test_a_long_run_is_launched_once_and_sampled_twice(work: Work) -> None:
    """60 ms a run; 6 ms three times."""
    device = Clockwork()
    points = [Toy(number=60_000), Toy(number=6_000)]
    rows = work(points, device)
    assert {r["number"]: r["samples"] for r in rows} == {60_000: 2, 6_000: 3}
    assert sorted(device.launched) == 3 * [6_000] + [60_000]


def test_a_chunk_without_time_measures_one_point_and_leaves_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Clockwork()
    toys = toy_family(device, [])
    know(monkeypatch, {"toy": toys, "gemm": fixed(GEMM)})
    chosen = [sweep_module.Chosen(toys, Toy(number=n), 0) for n in range(3)]
    sweep = sweep_module.Sweep(order(tmp_path, "toy"), set())
    rows, left = GpuBench(sweep, UnderWay(sweep), device).measure(chosen, until_s=0.0)
    assert statuses(rows) == {0: "ok"}
    assert left == [chosen[1:]]


def test_garbage_is_not_collected_while_points_are_timed(work: Work) -> None:
    class Watched(Clockwork):
        def launch(self, run: Any, behind_us: float = 0.0) -> Any:
            collecting.append(gc.isenabled())
            return super().launch(run, behind_us)

    collecting: list[bool] = []
    work([Toy(number=1)], Watched())
    assert not any(collecting) and gc.isenabled()


def test_nothing_is_left_of_the_budget(work: Work) -> None:
    """None was given, or a minute that began before the worker was started."""
    assert not work([Toy(number=1)], budget_s=0.0)
    assert not work([Toy(number=1)], budget_s=60.0, begin_s=time.monotonic() - 100.0)


def test_families_share_time_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points that cost ten times as much: a tenth of them; weight three: three times as many.

    On a GPU a family's weight is the one it has there.
    """
    points = [Toy(number=i) for i in range(500)]
    toys = {n: toy_family(Clockwork(), points, n) for n in ("cheap", "dear", "rich")}
    plain = GpuSweep(weight=1.0)
    known = {n: replace(toy, gpu_sweep=plain) for n, toy in toys.items()}
    known["rich"] = replace(known["rich"], weight=3.0)
    monkeypatch.setattr(sweep_module, "families", lambda: known)
    monkeypatch.setattr(sweep_module.Sweep, "_stream", lambda self, name: iter(points))
    cost_s = {"cheap": 0.01, "dear": 0.1, "rich": 0.01}
    found = {}
    for where in ("cpu", "cuda"):
        sweep = sweep_module.Sweep(replace(order(tmp_path, *known), device=where), set())
        for _ in range(300):
            family, *_ = sweep.choose(0.0) or pytest.fail("ran dry")
            row = {"family": family.name, "cost_s": cost_s[family.name], "cache": "warm"}
            sweep.settle([row])
        found[where] = [sweep.points[n] / sweep.points["cheap"] for n in ("dear", "rich")]
    assert found["cpu"] == pytest.approx([0.1, 3.0], rel=0.2)
    assert found["cuda"] == pytest.approx([0.1, 1.0], rel=0.2)
    sweep.order = order(tmp_path, *known, budget_s=0.5)
    assert len(sweep.choose_chunk(0.0, 96, 20.0)) < 60  # 0.5 s at 0.01 s a point or more
