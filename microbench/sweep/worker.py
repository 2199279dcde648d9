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
from dataclasses import asdict, replace
from pathlib import Path

from itercast.microbench import store
from itercast.microbench.ops.family import Family, Point, Workload
from itercast.microbench.processes.ranks import (
    join_process_group,
    max_over_ranks,
    rank0_value,
    time_collective,
)
from itercast.microbench.slow_imports import torch
from itercast.microbench.store import Row
from itercast.microbench.sweep.captured_points import ModelCaptures
from itercast.microbench.sweep.gpu_chunk_worker import sweep_in_chunks
from itercast.microbench.sweep.orders import WorkerOrder
from itercast.microbench.sweep.rows import failure
from itercast.microbench.sweep.scheduler import Chosen, Sweep, finished_keys
from itercast.microbench.timing.clock import Anchor, Clock, geometric_means, keep_freed_memory
from itercast.microbench.timing.cuda_device import CudaDevice

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


def measure_point(sweep: Sweep, clock: Clock, anchor: Anchor | None, chosen: Chosen) -> list[Row]:
    """The warm and the cold row of a point; one row of a collective, or of a failure."""
    family, point, _ = chosen
    begin = time.monotonic()
    rows: list[Row] = []
    try:
        workload = build_together(sweep.order, family, point)
        before = anchor.times_us() if anchor else None
        for cache in sweep.row_keys(*chosen):
            if family.ranks > 1:
                timing = time_collective(workload.run, sweep.order.device)
            else:
                timing = clock.time(workload, cache)
            measured = {**asdict(timing), "status": "ok"}
            if anchor and before:
                after = anchor.times_us()
                measured |= geometric_means(before, after)
                before = after
            rows.append(sweep.row(chosen, cache, measured))
    except Exception as exc:  # any failure becomes a row
        rows = [sweep.row(chosen, "warm", failure(exc))]
    cost_s = (time.monotonic() - begin) / len(rows)
    return [{**row, "cost_s": cost_s} for row in rows]


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
    clock = Clock(order.threads, order.hardware["cold_share"])
    anchor = Anchor(order.threads) if order.device == "cpu" else None
    captures = None
    if order.device == "cpu" and not (order.together or order.only):
        captures = ModelCaptures(Path(order.points), order.device, order.seed)
    begin = order.begin_s or time.monotonic()
    while (now := agreed_s(order, time.monotonic() - begin)) < order.budget_s:
        if captures is not None and captures.due(now, order.families):
            captures.capture_next()
        chosen = sweep.choose(now)
        if chosen is None:
            break
        rows = measure_point(sweep, clock, anchor, chosen)
        if order.together:
            rows = slowest_rows(rows)
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
