"""Worker, one process per rank: measures steps of sharded DLRMs and writes their times."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from itercast.capture.base.yaml_text import made_of
from itercast.extras.recommenders.sharded_dlrm import ShardedStep
from itercast.extras.recommenders.sharded_model import ShardedModel
from itercast.microbench.processes.ranks import join_process_group, max_over_ranks
from itercast.microbench.store import Row
from itercast.microbench.timing.clock import Anchor, keep_freed_memory

WARMUP = 1  # turns


def run(order: Row) -> None:
    """Measure the models of an order in ``rounds``; rank 0 writes ``out``.

    The models of a group take turns, one step each, so that what slows the machine slows them all.
    A line of JSON per model and round: number of the model, times of its ``steps`` on the slowest
    rank in us, and times of the anchor beside the group.
    """
    torch.set_num_threads(int(order["threads"]))
    keep_freed_memory()
    rank, _ = join_process_group("cpu")
    group = dist.new_group()
    with Path(order["out"]).open("a") as file:
        for numbers in int(order["rounds"]) * order["groups"]:
            models = [made_of(ShardedModel, order["models"][n], "order") for n in numbers]
            lines = in_turn(models, int(order["steps"]), group)
            for number, line in zip(numbers, lines, strict=True):
                if rank == 0:
                    file.write(json.dumps({"model": number, **line}) + "\n")
            file.flush()
    dist.destroy_process_group()


def in_turn(
    models: Sequence[ShardedModel], count: int, group: dist.ProcessGroup
) -> Iterator[dict[str, list[float]]]:
    """Yields times of ``count`` steps of each model, measured in turn.

    Each is preceded by an untimed step of the same model, so that caches hold what its own steps
    leave in them, as in training.
    """
    steps, anchor, anchors_us = list[ShardedStep](), Anchor().times_us, list[float]()
    for model in models:
        torch.manual_seed(dist.get_rank())  # the same row numbers under every sharding
        steps.append(ShardedStep(model, group))
    times_us: list[list[float]] = [[] for _ in models]
    for turn in range(WARMUP + count):
        for mine, step in zip(times_us, steps, strict=True):
            step()
            dist.barrier()
            start_ns = time.perf_counter_ns()
            step()
            if turn >= WARMUP:
                mine.append((time.perf_counter_ns() - start_ns) / 1e3)
        anchors_us.append(anchor()["anchor_us"])
    for mine in times_us:
        yield {"times_us": max_over_ranks(mine), "anchors_us": anchors_us}


if __name__ == "__main__":
    run(json.loads(Path(json.loads(sys.argv[1])["order"]).read_text()))
