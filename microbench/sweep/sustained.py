"""Measures sustained rates of a GPU: one large product repeated for two seconds, by dtype.

Between the short samples of a sweep a GPU idles and keeps its highest clock. In training it runs at
its power limit, at lower clocks. Rows with ``load`` "sustained" show how much slower a product is
then; other rows of a sweep have no ``load``.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from itercast.microbench import store
from itercast.microbench.ops import families
from itercast.microbench.ops.matrix.gemm import LARGE, Gemm
from itercast.microbench.store import Row
from itercast.microbench.sweep.gpu_chunks import Broken
from itercast.microbench.sweep.rows import failure
from itercast.microbench.sweep.scheduler import Sweep
from itercast.microbench.timing.clock import summarise
from itercast.microbench.timing.device import Device, Run
from itercast.microbench.timing.nvml import combined, is_throttled

DTYPES = ("bf16", "tf32", "fp32", "fp16", "fp8")
SUSTAINED_US = 2e6
SETTLE_US = 0.5e6  # until the power limit has lowered the clocks; earlier times are dropped
BATCH_US = 1e5  # of products, queued between two waits of the host
COST_S = 2.5  # of one dtype, allocation included
BUDGET_FRAC = 0.1  # of a worker's budget, for all dtypes
MAX_TRIES = 2  # of a dtype whose worker dies


def measure_sustained(sweep: Sweep, device: Device, journal: store.Journal) -> None:
    """Journal a row for each dtype of the GPU that has none; Broken after a sticky error."""
    end_s = time.monotonic() + BUDGET_FRAC * sweep.order.budget_s
    tries = Tries(Path(sweep.order.root), sweep.order.gpu)
    peaks = sweep.order.hardware["peak_flops_per_s"]
    for dtype in DTYPES if "gemm" in sweep.order.families else ():
        point = Gemm(
            op="scaled_mm" if dtype == "fp8" else "mm",
            m=LARGE,
            n=LARGE,
            k=LARGE,
            layout="nt" if dtype == "fp8" else "nn",
            dtype=dtype,
        )
        key = sustained_key(sweep, point)
        if dtype not in peaks or key in sweep.done or not sweep.mine(key):
            continue
        begin = time.monotonic()
        if begin + COST_S > end_s:
            return
        if tries.count(dtype) > MAX_TRIES:
            measured: Row = {"status": "error", "reason": "its worker process died"}
        else:
            measured = _measured(device, point)
        measured |= {"key": key, "load": "sustained", "cost_s": time.monotonic() - begin}
        journal.append([sweep.row((families()["gemm"], point, 0), "warm", measured)])
        sweep.done.add(key)


def sustained_key(sweep: Sweep, point: Gemm) -> str:
    """Key of a sustained row: differs from the sweep's keys of the same point."""
    row = {"family": "gemm", "gpu": sweep.order.gpu, "threads": sweep.order.threads, "repeat": 0}
    return store.point_key({**row, "cache": "sustained", "point": asdict(point)})


class Tries:
    """Counts on disk how often each dtype was begun under a root."""

    def __init__(self, root: Path, gpu: str) -> None:
        self.path = root / ".journal" / f"sustained-{gpu}.json"

    def count(self, dtype: str) -> int:
        """Count another try; returns the number of tries."""
        begun = json.loads(self.path.read_text()) if self.path.is_file() else {}
        begun[dtype] = begun.get(dtype, 0) + 1
        store.write_atomic(self.path, json.dumps(begun).encode())
        return int(begun[dtype])


def _measured(device: Device, point: Gemm) -> Row:
    """Measured columns of a row; Broken after a sticky error."""
    try:
        device.settings(point.dtype)
        return sustained_times(device, families()["gemm"].build(point, device.name).run)
    except Exception as exc:  # any failure becomes a row
        if device.broken():
            raise Broken(str(exc)) from exc
        return failure(exc)


def sustained_times(device: Device, run: Run) -> Row:
    """Times, clocks and power of a run repeated for two seconds, without the first half second.

    The host queues runs for a tenth of a second, reads clocks and power, and waits for the device.
    """
    run()
    first = device.launch(run)
    device.wait()
    batch = max(1, int(BATCH_US / max(device.elapsed_us(first), 1.0)))
    passed_us, times_us, readings = 0.0, [], []
    while passed_us < SUSTAINED_US:
        queued = [device.launch(run) for _ in range(batch)]
        reading = device.conditions()
        device.wait()
        found_us = [device.elapsed_us(launched) for launched in queued]
        passed_us += sum(found_us)
        if passed_us > SETTLE_US:
            times_us += found_us
            readings.append(reading)
    shared = combined(readings)
    if "energy_j" in shared:
        shared["energy_j"] = readings[-1]["energy_j"] - readings[0]["energy_j"]
    status = "throttled" if is_throttled(shared) else "ok"
    return {**asdict(summarise(times_us)), **shared, "status": status}
