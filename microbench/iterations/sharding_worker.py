"""Worker, one process per rank: measures steps of sharded DLRMs and writes their times."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from microbench.iterations.sharded_dlrm import (
    MeasuredShard,
    MeasuredTable,
    ShardedModel,
    ShardedStep,
)
from microbench.processes.ranks import join_process_group, max_over_ranks
from microbench.timing.clock import Anchor, keep_freed_memory

WARMUP = 2


def run(order: dict[str, Any]) -> None:
    """Measure all models of an order, ``rounds`` times one after the other; rank 0 writes ``out``.

    A line of JSON per model and round: number of the model, times of its steps on the slowest rank
    in us, median times of their stages by rank, and times of the anchor beside them.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(order["threads"]))
    keep_freed_memory()
    rank, _ = join_process_group("cpu")
    group = dist.new_group()
    anchor = Anchor().times_us
    with Path(order["out"]).open("a") as file:
        for number, values in int(order["rounds"]) * list(enumerate(order["models"])):
            torch.manual_seed(rank)
            step = ShardedStep(model_of(values), group)
            for _ in range(WARMUP):
                step()
            times, stages, anchors = [], [], []
            for _ in range(int(order["steps"])):
                dist.barrier()
                start = time.perf_counter_ns()
                step()
                times.append((time.perf_counter_ns() - start) / 1e3)
                stages.append(step.stages_us)
                anchors.append(anchor()["anchor_us"])
            slowest = max_over_ranks(times)
            middle = torch.tensor(stages, dtype=torch.float64).median(dim=0).values
            by_rank = [torch.zeros_like(middle) for _ in range(dist.get_world_size())]
            dist.all_gather(by_rank, middle)
            if rank == 0:
                line = {
                    "model": number,
                    "times_us": slowest,
                    "stages_us": [stage.tolist() for stage in by_rank],
                    "anchors_us": anchors,
                }
                file.write(json.dumps(line) + "\n")
                file.flush()
            del step
    dist.destroy_process_group()


def model_of(values: dict[str, Any]) -> ShardedModel:
    """The model of plain values, as ``dataclasses.asdict`` gives them."""
    tables = tuple(MeasuredTable(**t) for t in values["tables"])
    shards = tuple(MeasuredShard(**s) for s in values["shards"])
    widths = {name: tuple(values[name]) for name in ("bottom", "top")}
    return ShardedModel(**{**values, "tables": tables, "shards": shards, **widths})


if __name__ == "__main__":
    run(json.loads(Path(json.loads(sys.argv[1])["order"]).read_text()))
