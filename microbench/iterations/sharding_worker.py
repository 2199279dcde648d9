"""Worker, one process per rank: measures steps of sharded DLRMs and writes their times."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from itercast.microbench.iterations.sharded_dlrm import ShardedStep
from itercast.microbench.iterations.sharded_model import ShardedModel, model_of
from itercast.microbench.processes.ranks import join_process_group, max_over_ranks
from itercast.microbench.timing.clock import Anchor, keep_freed_memory

WARMUP = 2


def run(order: dict[str, Any]) -> None:
    """Measure the models of an order in ``rounds``; rank 0 writes ``out``.

    The models of a group take turns, one step each, so that what slows the machine slows them all.
    A line of JSON per model and round: number of the model, times of its ``steps`` on the slowest
    rank in us, median times of their stages by rank, and times of the anchor beside the group.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(order["threads"]))
    keep_freed_memory()
    rank, _ = join_process_group("cpu")
    group = dist.new_group()
    with Path(order["out"]).open("a") as file:
        for numbers in int(order["rounds"]) * order["groups"]:
            models = [model_of(order["models"][n]) for n in numbers]
            for number, line in zip(
                numbers, in_turn(models, int(order["steps"]), group), strict=True
            ):
                if rank == 0:
                    file.write(json.dumps({"model": number, **line}) + "\n")
            file.flush()
    dist.destroy_process_group()


def in_turn(models: Sequence[ShardedModel], count: int, group: Any) -> Iterator[dict[str, Any]]:
    """Yields what ``count`` steps of each model took, measured in turn."""
    import torch
    import torch.distributed as dist

    steps, anchor = [], Anchor().times_us
    for model in models:
        torch.manual_seed(dist.get_rank())  # the same row numbers under every sharding
        steps.append(step_of(model, group))
    times: list[list[float]] = [[] for _ in models]
    stages: list[list[list[float]]] = [[] for _ in models]
    anchors = []
    for turn in range(WARMUP + count):
        for mine, parts, step in zip(times, stages, steps, strict=True):
            dist.barrier()
            start = time.perf_counter_ns()
            step()
            if turn >= WARMUP:
                mine.append((time.perf_counter_ns() - start) / 1e3)
                parts.append(step.stages_us)
        anchors.append(anchor()["anchor_us"])
    for mine, parts in zip(times, stages, strict=True):
        middle = torch.tensor(parts, dtype=torch.float64).median(dim=0).values
        by_rank = [torch.zeros_like(middle) for _ in range(dist.get_world_size())]
        dist.all_gather(by_rank, middle)
        yield {
            "times_us": max_over_ranks(mine),
            "stages_us": [stage.tolist() for stage in by_rank],
            "anchors_us": anchors,
        }


def step_of(model: ShardedModel, group: Any) -> Any:
    """This rank's step of a model; ``group`` is for the exchanges of our own."""
    if model.library == "torch":
        return ShardedStep(model, group)
    from itercast.microbench.iterations.torchrec_dlrm import TorchrecStep  # needs torchrec

    return TorchrecStep(model)


if __name__ == "__main__":
    run(json.loads(Path(json.loads(sys.argv[1])["order"]).read_text()))
