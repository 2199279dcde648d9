"""Measures steps of DDP, local SGD and DiLoCo of two ranks over gloo in turn, and forecasts them.

Run as ``python tests/endurance/local_steps.py CASE,CASE... BUNDLE`` on two cores. A machine's speed
may change within a run: variants alternate in windows of 16 steps, and each window is judged by
its ratio to the DDP window just before it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from itercast.capture.cases.registry import case
from itercast.capture.step import StepSettings
from itercast.compose.predict import predict
from itercast.microbench.iterations.plan_steps import make_plan_step
from itercast.microbench.processes.ranks import join_process_group, max_over_ranks, start_ranks
from itercast.microbench.timing.clock import keep_freed_memory

VARIANTS = [f"local={k}{outer}" for outer in ("", ",outer") for k in (1, 4, 16)]
STEPS, ROUNDS = 16, 8


def run(order: dict[str, Any]) -> None:
    """Time windows of every variant after one of DDP; rank 0 writes the ratios of each."""
    rank, _ = join_process_group("cpu")
    os.sched_setaffinity(0, {rank})  # some schedulers leave both ranks on one core
    keep_freed_memory()
    torch.set_num_threads(1)
    chosen = case(order["case"])

    def made(plan: str) -> Any:
        arguments = (chosen, plan, chosen.batch, chosen.seq, StepSettings(), "cpu")
        return make_plan_step(*arguments, lambda phase: None)

    def window_us(step: Any) -> float:
        dist.barrier()
        start_ns = time.perf_counter_ns()
        for _ in range(STEPS):
            step.run()
        return max_over_ranks([(time.perf_counter_ns() - start_ns) / 1e3 / STEPS])[0]

    ddp = made("dp=2")
    steps = {text: made(f"dp=2,{text}") for text in VARIANTS}
    ratios: dict[str, list[float]] = {text: [] for text in VARIANTS}
    alone: list[float] = []
    for turn in range(1 + ROUNDS):
        for text, step in steps.items():
            pair = window_us(ddp), window_us(step)
            if turn:
                ratios[text].append(pair[1] / pair[0])
                alone.append(pair[0])
    if rank == 0:
        found = {text: statistics.median(some) for text, some in ratios.items()}
        Path(order["out"]).write_text(json.dumps({**found, "dp": statistics.median(alone)}))


def main(names: str, bundle: str) -> None:
    """Measure and forecast each case."""
    here = (str(Path(__file__).parent), str(Path(__file__).parents[2]))
    os.environ["PYTHONPATH"] = os.pathsep.join(here)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "ratios.json"
        for name in names.split(","):
            if start_ranks("local_steps", {"case": name, "out": str(out)}, 2).wait():
                raise RuntimeError(f"{name}: the ranks failed")
            found = json.loads(out.read_text())
            us = {
                text: predict(name, gpu="cpu", plan=text, bundle=Path(bundle)).iteration_us
                for text in ("dp=2", *(f"dp=2,{v}" for v in VARIANTS))
            }
            print(f"{name}: DDP {found.pop('dp') / 1e3:.1f} ms, forecast {us['dp=2'] / 1e3:.1f}")
            for text, ratio in found.items():
                forecast = us[f"dp=2,{text}"] / us["dp=2"]
                error = 100 * (forecast / ratio - 1)
                print(f"  {text:16} {ratio:.3f} of DDP, forecast {forecast:.3f}: {error:+.1f} %")


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        run(json.loads(sys.argv[1]))
    else:
        main(sys.argv[1], sys.argv[2])
