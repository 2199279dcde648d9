"""A worker process of a sweep: chooses points, times them and journals every row.

Several ranks time the points that rank 0 chooses at the same time, as the ranks of a training job
do; the time of the slowest rank counts, and rank 0 writes the rows.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from itercast.capture.base.slow_imports import torch
from itercast.microbench import store
from itercast.microbench.hardware.machine import scratch_bytes
from itercast.microbench.ops.family import Family, Point, Workload
from itercast.microbench.processes.ranks import (
    join_process_group,
    max_over_ranks,
    rank0_value,
    time_collective,
)
from itercast.microbench.store import Row
from itercast.microbench.sweep.captured_points import ModelCaptures
from itercast.microbench.sweep.gpu_chunk_worker import sweep_in_chunks
from itercast.microbench.sweep.orders import WorkerOrder
from itercast.microbench.sweep.rows import failure
from itercast.microbench.sweep.scheduler import Chosen, Sweep, finished_keys
from itercast.microbench.timing.clock import Anchor, Clock, geometric_means, keep_freed_memory
from itercast.microbench.timing.cuda_device import CudaDevice

CHUNK_POINTS = 32  # no assumption: of a CPU's chunk, whose cold times share flushes
TWIN_US = 2000.0  # no assumption: of longer ops cold code is a small part, and operands are large
CHUNK_S = 1.0  # no assumption: after it a chunk gets no further point,
CHUNK_FRAC = 0.05  # no assumption: nor after this share of the sweep's time
TIMES = ("time_us", "time_us_p20", "time_us_p80", "anchor_us", "serial_us", "cost_s")


def build_together(order: WorkerOrder, family: Family, point: Point) -> Workload:
    """Build a point's workload; RuntimeError where another rank could not build it."""
    raised: Exception | None = None
    try:
        workload = family.build(point, order.device)
    except Exception as exc:  # any failure becomes a row
        raised = exc
    if order.together and max_over_ranks([float(raised is not None)])[0] and raised is None:
        raised = RuntimeError("another rank could not build it")
    if raised is not None:
        raise raised
    return workload


@dataclass(slots=True, kw_only=True)
class Measured:
    """A point's rows so far; workload and twin are None where no cold time is to be measured."""

    chosen: Chosen
    rows: list[Row]
    cost_s: float
    workload: Workload | None = None
    twin: Workload | None = None


def measure_chunk(
    sweep: Sweep, clock: Clock, anchor: Anchor | None, now_s: float
) -> list[list[Row]]:
    """Choose points and measure them: the warm and the cold row of each; none at the end.

    A collective, or a point that failed, has one row. Cold times of all points come last, as they
    share the flushes of the caches.
    """
    order, start, points = sweep.order, time.monotonic(), list[Measured]()
    most_s, room = min(CHUNK_S, CHUNK_FRAC * order.budget_s), scratch_bytes(order.ranks)
    while len(points) < CHUNK_POINTS and room > 0:
        if agreed_s(order, time.monotonic() - start) >= most_s:
            break
        chosen = sweep.choose(now_s)
        if chosen is None:
            break
        sweep.charge(chosen[0])
        points.append(_warm(sweep, clock, anchor, chosen))
        room -= 2.0 * float(chosen[0].bytes_moved(chosen[1]))  # the twin has as many
    cold = [(p, p.workload) for p in points if p.workload]
    begin, before = time.monotonic(), anchor.times_us() if anchor else {}
    timings = clock.time_cold([(workload, p.twin) for p, workload in cold])
    speed = geometric_means(before, anchor.times_us()) if anchor else {}
    shared_s = (time.monotonic() - begin) / max(1, len(cold))
    for (point, _), timing in zip(cold, timings, strict=True):
        measured = {**asdict(timing), "status": "ok", **speed}
        point.rows.append(sweep.row(point.chosen, "cold", measured))
        point.cost_s += shared_s
    return [[{**row, "cost_s": p.cost_s / len(p.rows)} for row in p.rows] for p in points]


def _warm(sweep: Sweep, clock: Clock, anchor: Anchor | None, chosen: Chosen) -> Measured:
    """Build a point and time it with warm caches; a collective on all ranks together."""
    family, point, _ = chosen
    begin = time.monotonic()
    workload: Workload | None = None
    twin: Workload | None = None
    try:
        built = build_together(sweep.order, family, point)
        before = anchor.times_us() if anchor else {}
        if family.ranks > 1:
            timing = time_collective(built.run, sweep.order.device)
        else:
            timing, workload = clock.time_warm(built), built
        speed = geometric_means(before, anchor.times_us()) if anchor else {}
        row = sweep.row(chosen, "warm", {**asdict(timing), "status": "ok", **speed})
        if workload and timing.time_us < TWIN_US:
            twin = family.build(point, sweep.order.device)
    except Exception as exc:  # any failure becomes a row
        workload, row = None, sweep.row(chosen, "warm", failure(exc))
    cost_s = time.monotonic() - begin
    return Measured(chosen=chosen, rows=[row], cost_s=cost_s, workload=workload, twin=twin)


def agreed_s(order: WorkerOrder, now_s: float) -> float:
    """The latest time of all ranks, so that all ranks stop at the same point."""
    return max_over_ranks([now_s])[0] if order.together else now_s


def slowest_rows(rows: list[Row]) -> list[Row]:
    """Replace times by those of the slowest rank; a point that failed on one rank has failed."""
    times = [[float(row.get(name, math.inf)) for name in TIMES] for row in rows]
    times += [[math.inf] * len(TIMES)] * (2 - len(rows))  # a failure is one row, a success two
    together = max_over_ranks([t for row in times for t in row])
    found = []
    for number, row in enumerate(rows):
        values = together[number * len(TIMES) :][: len(TIMES)]
        measured = {n: t for n, t in zip(TIMES, values, strict=True) if n in row}
        if any(math.isinf(t) for t in measured.values()) and row["status"] == "ok":
            row = {**row, "status": "error", "reason": "another rank failed"}
            measured = {}
        found.append({**row, **measured})
    return found


def run(order: WorkerOrder) -> None:
    """Measure points until the budget is spent; every tenth point again, much later."""
    torch.set_num_threads(max(1, order.threads))
    torch.manual_seed(order.seed)
    if order.device == "cpu":
        keep_freed_memory()
    root = Path(order.root)
    rank = 0
    if order.together:
        rank, _ = join_process_group(order.device)
        order = replace(order, budget_s=rank0_value(round(1e3 * order.budget_s)) / 1e3)
    sweep = Sweep(order, finished_keys(root, order.families))
    journal = store.Journal(root, order.run_id) if rank == 0 else None
    if order.device == "cuda" and journal is not None and not order.together:
        sweep_in_chunks(sweep, CudaDevice(order.hardware["l2_bytes"]), journal)
        return
    clock = Clock(order.threads, order.hardware["cold_share"], order.ranks)
    anchor = Anchor(order.threads) if order.device == "cpu" else None
    captures = None
    if order.device == "cpu" and not (order.together or order.only):
        captures = ModelCaptures(Path(order.points), order.device, order.seed)
    begin = order.begin_s or time.monotonic()
    while (now := agreed_s(order, time.monotonic() - begin)) < order.budget_s:
        if captures is not None and captures.due(now, order.families):
            captures.capture_next()
        measured = measure_chunk(sweep, clock, anchor, now)
        if not measured:
            break
        if order.together:
            measured = [slowest_rows(rows) for rows in measured]
        rows = [row for of_point in measured for row in of_point]
        if journal is not None:
            journal.append(rows)
        sweep.settle(rows)
    if order.together:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("microbench").setLevel(logging.INFO)
    fields = json.loads(sys.argv[1])
    run(WorkerOrder(**{**fields, "families": tuple(fields["families"])}))
