"""A worker process of a sweep: chooses chunks of points, measures them and journals their rows.

Several ranks time the points that rank 0 chooses at the same time, as the ranks of a training job
do; the time of the slowest rank counts, and rank 0 writes the rows.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from itercast.capture.base.slow_imports import torch
from itercast.microbench import store
from itercast.microbench.processes.ranks import join_process_group, rank0_value
from itercast.microbench.processes.watch import EXIT_BROKEN, ending_on_full_disks
from itercast.microbench.sweep.captured_points import ModelCaptures
from itercast.microbench.sweep.cpu_chunks import CpuBench, agreed_s
from itercast.microbench.sweep.gpu_chunks import Broken, GpuBench
from itercast.microbench.sweep.orders import WorkerOrder
from itercast.microbench.sweep.scheduler import Chosen, Sweep, finished_keys
from itercast.microbench.sweep.under_way import CHUNK, UnderWay
from itercast.microbench.timing.clock import keep_freed_memory
from itercast.microbench.timing.cuda_device import CudaDevice

Bench = CpuBench | GpuBench


def run(order: WorkerOrder) -> None:
    """Measure points until the budget is spent; every tenth point again, much later."""
    torch.set_num_threads(max(1, order.threads))
    torch.manual_seed(order.seed)
    if order.device == "cpu":
        keep_freed_memory()
    rank = 0
    if order.together:
        rank, _ = join_process_group(order.device)
        order = replace(order, budget_s=rank0_value(round(1e3 * order.budget_s)) / 1e3)
    root = Path(order.root)
    sweep = Sweep(order, finished_keys(root, order.families))
    under_way, captures = UnderWay(sweep), None
    if order.device == "cuda" and not order.together:
        bench: Bench = GpuBench(sweep, under_way, CudaDevice(order.hardware["l2_bytes"]))
    else:
        bench = CpuBench(sweep, under_way)
        if not (order.together or order.only):
            captures = ModelCaptures(Path(order.points), order.device, order.seed)
    journal = store.Journal(root, order.run_id) if rank == 0 else None
    measure(sweep, bench, under_way, journal, captures)
    if order.together:
        torch.distributed.destroy_process_group()


def measure(
    sweep: Sweep,
    bench: Bench,
    under_way: UnderWay,
    journal: store.Journal | None,
    captures: ModelCaptures | None = None,
) -> None:
    """Measure chunk after chunk; SystemExit where only another process can go on.

    The point that the worker before this one died of gets an error row. ``captures``: models that
    are captured between chunks.
    """
    order = sweep.order
    begin_s = order.begin_s or time.monotonic()
    waiting: deque[list[Chosen]] = deque()
    # where it is not known which point of a chunk ended the last process, that shows
    left_alone = bench.points if under_way.died_at == CHUNK else 0
    if journal and under_way.culprit:
        journal.append([under_way.culprit])
        sweep.done.add(under_way.culprit["key"])
    while (now_s := agreed_s(order, time.monotonic() - begin_s)) < order.budget_s:
        if captures is not None and captures.due(now_s, order.families):
            captures.capture_next()
        if not waiting:
            points, left_alone = 1 if left_alone > 0 else bench.points, left_alone - 1
            waiting.append(sweep.choose_chunk(now_s, points, bench.seconds))
        chosen = waiting.popleft()
        if not chosen:
            break
        until_s = time.monotonic() + min(bench.seconds, order.budget_s - now_s)
        under_way.begin(chosen)
        try:
            rows, left = bench.measure(chosen, until_s)
        except Broken as exc:
            under_way.blame(journal, str(exc))
            raise SystemExit(EXIT_BROKEN) from exc
        if journal is not None:
            journal.append(rows)
        sweep.settle(rows)
        if bench.broken:
            raise SystemExit(EXIT_BROKEN)
        under_way.end()
        waiting.extend(points for points in left if points)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("microbench").setLevel(logging.INFO)
    fields = json.loads(sys.argv[1])
    with ending_on_full_disks():
        run(WorkerOrder(**{**fields, "families": tuple(fields["families"])}))
