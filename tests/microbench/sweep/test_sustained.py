"""Large products repeated for two seconds; what the host pays for a launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clockwork import HARDWARE, Clockwork, order

from itercast.microbench import store
from itercast.microbench.ops.family import Workload
from itercast.microbench.ops.matrix.gemm import FAMILY as GEMM
from itercast.microbench.sweep import gpu_chunk_worker
from itercast.microbench.sweep import scheduler as sweep_module
from itercast.microbench.sweep.sustained import sustained_times
from itercast.microbench.timing.host_timing import launch_us


class Warming(Clockwork):
    """A product takes 1000 us while the clock is high: half a second. Then 1500."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_us = 0.0

    def hot(self) -> bool:
        return self.passed_us > 0.5e6

    def product(self) -> float:
        time_us = 1500.0 if self.hot() else 1000.0
        self.passed_us += time_us
        return time_us

    def conditions(self) -> dict[str, Any]:
        return {"sm_clock_hz": 1.2e9 if self.hot() else 1.8e9, "energy_j": self.passed_us / 1e3}


def test_the_first_half_second_does_not_count() -> None:
    device = Warming()
    found = sustained_times(device, device.product)
    assert found["time_us_p20"] == found["time_us_p80"] == 1501.5  # 1.5 between events
    assert found["sm_clock_hz_min"] == 1.2e9
    assert found["samples"] * 1501.5 == pytest.approx(1.5e6, rel=0.2)
    assert found["status"] == "ok"


def sweep_products(
    root: Path, monkeypatch: pytest.MonkeyPatch, device: Clockwork, run: Any, budget_s: float = 60.0
) -> list[dict[str, Any]]:
    """One worker of family gemm that has time for sustained products only; the journal then."""
    known = {"gemm": replace(GEMM, build=lambda p, where: Workload(run=run))}
    for module in ("gpu_chunk_worker", "sustained", "scheduler"):
        monkeypatch.setattr(f"itercast.microbench.sweep.{module}.families", lambda: known)
    monkeypatch.setattr(gpu_chunk_worker, "choose_chunk", lambda sweep, now_s: [])
    peaks = {"fp32": 1e12, "fp8": 2e12}
    asked = order(root, "gemm", budget_s=budget_s)
    asked = replace(asked, hardware={**HARDWARE, "peak_flops_per_s": peaks})
    sweep = sweep_module.Sweep(asked, sweep_module.finished_keys(root, ("gemm",)))
    journal = store.Journal(root, "run")
    try:
        gpu_chunk_worker.sweep_in_chunks(sweep, device, journal)
    finally:
        journal.close()
    return store.read_journal(root / ".journal" / "run.jsonl")


def test_every_dtype_of_the_gpu_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not where its 2.5 s are more than a tenth of the time."""
    device = Warming()
    assert not sweep_products(tmp_path, monkeypatch, device, device.product, budget_s=24.0)
    rows = sweep_products(tmp_path, monkeypatch, device, device.product)
    assert [(r["op"], r["dtype"], r["layout"]) for r in rows] == [
        ("mm", "fp32", "nn"),
        ("scaled_mm", "fp8", "nt"),
    ]
    assert {(r["family"], r["load"], r["cache"], r["status"]) for r in rows} == {
        ("gemm", "sustained", "warm", "ok")
    }
    assert {r["m"] * r["n"] * r["k"] for r in rows} == {8192**3}
    assert sweep_products(tmp_path, monkeypatch, device, device.product) == rows


def test_a_product_that_fails_is_a_row_and_one_that_kills_twice_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead(BaseException):
        """The process ends."""

    def unsupported() -> None:
        raise RuntimeError("torch._scaled_mm is only supported on newer devices")

    def kill() -> None:
        raise Dead

    rows = sweep_products(tmp_path / "a", monkeypatch, Clockwork(), unsupported)
    assert [r["status"] for r in rows] == ["unsupported"] * 2
    for _ in range(4):  # fp32 twice, then fp8 twice
        with pytest.raises(Dead):
            sweep_products(tmp_path / "b", monkeypatch, Clockwork(), kill)
    rows = sweep_products(tmp_path / "b", monkeypatch, Clockwork(), kill)
    assert [(r["dtype"], r["reason"]) for r in rows] == [
        ("fp32", "its worker process died"),
        ("fp8", "its worker process died"),
    ]


def test_a_launch_is_the_least_of_three_less_what_no_step_pays() -> None:
    """3 us of a baseline; without one 1.5 us for a call through torch.ops.aten, else 0.5 us."""
    cost: Any = SimpleNamespace(us=lambda through_aten: 1.5 if through_aten else 0.5)

    def nothing() -> None:
        """Not run."""

    through, bound = Workload(run=nothing), Workload(run=nothing, through_aten=False)
    assert launch_us(through, [9.0, 8.0, 30.0], [], cost) == 6.5
    assert launch_us(bound, [9.0, 8.0, 30.0], [], cost) == 7.5
    assert launch_us(replace(through, baseline=nothing), [9.0, 8.0], [4.0, 3.0], cost) == 5.0
    assert launch_us(replace(bound, calls=5), [9.0, 8.0], [], cost) == 1.5
    assert launch_us(bound, [0.6], [], cost) == 0.5  # no call from Python is cheaper
