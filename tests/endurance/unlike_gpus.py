"""Measures every split of a batch over ranks of 1 and of 2 threads, and judges the one forecast.

Run as ``python tests/endurance/unlike_gpus.py [CASE,CASE... [BUNDLE]]`` on two cores (about 5
minutes): over gloo, eight parts of a batch, all splits in turn. It prints how much slower the
chosen split is than the fastest one that was measured.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from itercast.capture.cases.registry import case
from itercast.capture.step import StepSettings, make_step
from itercast.compose.clusters.search import predict_on_cluster
from itercast.microbench.processes.ranks import join_process_group, max_over_ranks, start_ranks
from itercast.microbench.store import Row
from itercast.microbench.timing.clock import keep_freed_memory

CASES = "gpt-s,gpt-m,llama-s,llama-m,bert-s,bert-m,mlp-m,mlp-l,vit-s,resnet-s"
CLUSTER = """groups:
  one: {gpu: cpu, count: 1, threads: 1}
  two: {gpu: cpu, count: 1, threads: 2}
"""
PARTS = 8
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


def measured_us(name: str, part: int, folder: Path) -> list[float]:
    """Median time of a step by number of parts on the rank of one thread: 1, 2... 7."""
    out, seq = folder / f"{name}.json", case(name).seq
    steps = [
        [
            {"threads": 1, "rows": a * part, "seq": seq},
            {"threads": 2, "rows": (PARTS - a) * part, "seq": seq},
        ]
        for a in range(1, PARTS)
    ]
    rounds = 15 if name.endswith(("-m", "-l")) else 61
    order = {"case": name, "steps": steps, "rounds": rounds, "out": str(out)}
    if start_ranks("unlike_gpus", order, 2).wait():
        raise RuntimeError(f"{name}: the ranks failed")
    return [statistics.median(times) for times in json.loads(out.read_text())]


def main(names: str = CASES, bundle: str = "") -> None:
    """Measure and judge each case."""
    here = (str(Path(__file__).parent), str(Path(__file__).parents[2]))
    os.environ["PYTHONPATH"] = os.pathsep.join(here)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "cluster.yaml"
        file.write_text(CLUSTER)
        for name in names.split(","):
            part = 16 if name.startswith("mlp") else 1
            trained = Path(bundle) if bundle else None
            batch = PARTS * part // 2
            found = predict_on_cluster(name, file, "dp=2", batch=batch, bundle=trained)
            chosen = found.cluster["groups"][0]["rows"] / part
            times = measured_us(name, part, Path(scratch))
            at = min(PARTS - 1, max(1, round(chosen)))
            over = times[at - 1] / min(times) - 1
            told = " ".join(f"{us / 1e3:.1f}" for us in times)
            print(
                f"{name}: chosen {chosen:g} of {PARTS}, {100 * over:.1f} % over the best of {told}"
            )


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        run(json.loads(sys.argv[1]))
    else:
        main(*sys.argv[1:])
