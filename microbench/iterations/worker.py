"""One process, or one rank of several, that measures iterations and journals the rows."""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from microbench import store
from microbench.cases.registry import EvalCase, case
from microbench.iterations.measure import Iteration, measure
from microbench.processes.ranks import join, slowest
from microbench.sweep.gpu_chunk_worker import EXIT_BROKEN
from microbench.sweep.orders import stack
from microbench.timing.clock import Anchor, keep_freed_memory
from microbench.timing.gpu_watch import GpuWatch
from microbench.timing.nvml import Nvml, is_throttled

DISTURBED = 2.0  # times the least anchor: somebody else had the machine
TRIES = 3
# Seconds to begin an iteration with: building it, 15 to 25 steps; torch.compile takes a minute
NEEDED_S = {"eager": 4.0, "graph": 5.0, "compile": 60.0}
GLANCES = 20  # at the anchor before the first case, a tenth of a second apart


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationOrder:
    """What one worker, or each rank of a group, measures once."""

    root: str
    run_id: str
    device: str
    gpu: str
    threads: int
    ranks: int
    repeat: int
    iterations: tuple[Iteration, ...]
    budget_s: float = math.inf  # an iteration that would not end within it is not begun
    begin_s: float = 0.0  # time.monotonic() when the budget begins; 0: when the worker is ready


def iteration_key(order: IterationOrder, asked: Iteration) -> str:
    """Key of an iteration's row; eager is what rows without an engine are."""
    row = {"family": "iteration", "gpu": order.gpu, "threads": order.threads, "cache": "warm"}
    point = {k: v for k, v in asdict(asked).items() if (k, v) != ("engine", "eager")}
    return store.point_key({**row, "repeat": order.repeat, "point": point})


def row_facts(order: IterationOrder, asked: Iteration) -> dict[str, Any]:
    """What a row says beside what was measured."""
    return {
        "family": "iteration",
        "gpu": order.gpu,
        "stack": stack(),
        "timer": "with_launch",
        "threads": order.threads,
        "repeat": order.repeat,
        "run_id": order.run_id,
        "key": iteration_key(order, asked),
    }


def run(order: IterationOrder) -> None:
    """Measure one after the other; rank 0 writes.

    SystemExit where a GPU answers no more, or may not: after a graph that could not be captured
    the random generator stays in capture mode, and every later dropout fails.
    """
    import torch  # lazy: the parent must not pay for it

    torch.set_num_threads(max(1, order.threads))
    torch.manual_seed(0)
    rank = 0
    if order.device == "cpu":
        keep_freed_memory()
    if order.ranks > 1:
        rank, _ = join(order.device)
    calm = Calm(order.ranks > 1) if order.device == "cpu" else None
    journal = store.Journal(Path(order.root), order.run_id) if rank == 0 else None
    gpu = SingleGpu() if order.device == "cuda" else None
    end_s = (order.begin_s or time.monotonic()) + order.budget_s
    for asked in order.iterations:
        if gpu and time.monotonic() + NEEDED_S[asked.engine] > end_s:
            break
        one, begin_s = case(asked.case), time.monotonic()
        if calm:
            measured = calm.measure(one, asked)
        else:
            measured = measure(one, asked, order.device, watch=gpu.watch if gpu else None)
        if gpu:
            measured = gpu.after(measured)
        if journal is not None:
            cost = {"cost_s": time.monotonic() - begin_s} if gpu else {}
            journal.append([{**row_facts(order, asked), **measured, **cost}])
        if gpu and gpu.broken:
            raise SystemExit(EXIT_BROKEN)
    if order.ranks > 1:
        torch.distributed.destroy_process_group()


class Calm:
    """A CPU shared with others: what was measured while they had most of it is measured again."""

    def __init__(self, together: bool) -> None:
        self.anchor = Anchor().times_us
        glances = []
        for _ in range(GLANCES):
            glances.append(self.anchor()["anchor_us"])
            time.sleep(0.1)
        least_us = min(glances)
        self.least_us = slowest([least_us])[0] if together else least_us

    def measure(self, one: EvalCase, asked: Iteration) -> dict[str, Any]:
        """The row with the least anchor of up to three; ranks find the same anchors."""
        rows: list[dict[str, Any]] = []
        while len(rows) < TRIES:
            rows.append(measure(one, asked, "cpu", anchor=self.anchor))
            if rows[-1]["status"] != "ok" or rows[-1]["anchor_us"] <= DISTURBED * self.least_us:
                return rows[-1]
        return min(rows, key=lambda row: row["anchor_us"])


class SingleGpu:
    """The GPU between iterations: whether it was throttled, its memory given back."""

    def __init__(self) -> None:
        import torch  # lazy, as above

        self.torch: Any = torch
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self.watch = GpuWatch(Nvml(uuid))
        self.broken = False

    def after(self, measured: dict[str, Any]) -> dict[str, Any]:
        """The row, throttled or not; ``broken`` where the next iteration needs another process."""
        if measured["status"] == "ok" and is_throttled(measured):
            measured = {**measured, "status": "throttled"}
        failed = measured["status"] not in ("ok", "throttled")
        self.broken = failed and measured["engine"] != "eager"
        try:
            if measured["engine"] == "compile":
                self.torch._dynamo.reset()
            gc.collect()
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()
            self.torch.cuda.reset_peak_memory_stats()
        except RuntimeError:
            self.broken = True
        return measured


if __name__ == "__main__":
    fields: dict[str, Any] = json.loads(sys.argv[1])
    asked = tuple(Iteration(**one) for one in fields["iterations"])
    run(IterationOrder(**{**fields, "iterations": asked}))
