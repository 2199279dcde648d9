"""Worker, one process per rank: times DDP steps whose ranks have unlike work, in turn.

Run by torchrun as ``python -m itercast.microbench.iterations.unlike_ranks ORDER``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from itercast.microbench.cases.registry import case
from itercast.microbench.processes.ranks import join_process_group, max_over_ranks
from itercast.microbench.step import StepSettings, make_step
from itercast.microbench.store import Row
from itercast.microbench.timing.clock import keep_freed_memory

WARMUP = 2


def run(order: Row) -> None:
    """Time each of ``steps`` in ``rounds``; rank 0 writes ``out``: a list of times in us for each.

    A step states ``threads``, ``rows`` and ``seq`` of every rank. Steps take turns, so that what
    slows the machine slows them all. Times are those of the slowest rank.
    """
    keep_freed_memory()
    rank, _ = join_process_group("cpu")
    chosen = case(order["case"])
    torch.manual_seed(0)
    model = DistributedDataParallel(chosen.build())
    mine = [step[rank] for step in order["steps"]]
    steps = [
        make_step(model, chosen.inputs(one["rows"], one["seq"]), chosen.loss, StepSettings())
        for one in mine
    ]
    times_us: list[list[float]] = [[] for _ in steps]
    for turn in range(WARMUP + order["rounds"]):
        for kept, one, step in zip(times_us, mine, steps, strict=True):
            torch.set_num_threads(one["threads"])
            dist.barrier()
            start_ns = time.perf_counter_ns()
            step()
            if turn >= WARMUP:
                kept.append((time.perf_counter_ns() - start_ns) / 1e3)
    slowest = [max_over_ranks(kept) for kept in times_us]
    if rank == 0:
        Path(order["out"]).write_text(json.dumps(slowest))
    dist.destroy_process_group()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
