"""One rank of a collective sweep; rank 0 chooses the points and journals the rows."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from microbench import store
from microbench.collect import WorkerOrder, stack
from microbench.ops import families
from microbench.ranks import agree, join, slowest, time_together
from microbench.timing import Anchor, keep_freed_memory
from microbench.worker import MIN_RETEST_AGE_FRAC, RETEST_EVERY, finished_keys

POINTS = 4000
STOP = -1


class CollectiveSweep:
    """Rank 0's choice of points and its journal; other ranks follow."""

    def __init__(self, order: WorkerOrder, points: list[Any], rank: int) -> None:
        self.order, self.points, self.lead = order, points, rank == 0
        self.retests: deque[tuple[float, int]] = deque()
        self.count = 0
        self.fresh: Iterator[int] = iter(())
        if self.lead:
            done = finished_keys(Path(order.root), ("collective",))
            self.fresh = (i for i in range(len(points)) if self.key(i, 0) not in done)
            self.journal = store.Journal(Path(order.root), order.run_id)

    def key(self, index: int, repeat: int) -> str:
        """Key of a point's row."""
        common: dict[str, Any] = {
            "family": "collective",
            "gpu": self.order.gpu,
            "threads": 1,
            "cache": "warm",
        }
        return store.point_key({**common, "repeat": repeat, "point": asdict(self.points[index])})

    def choose(self, now_s: float) -> tuple[int, int]:
        """Index of the next point and 1 if it is measured again; STOP where the budget is spent."""
        if not self.lead or now_s >= self.order.budget_s:
            return STOP, 0
        if self.retests and now_s - self.retests[0][0] > MIN_RETEST_AGE_FRAC * self.order.budget_s:
            return self.retests.popleft()[1], 1
        index = next(self.fresh, STOP)
        self.count += 1
        if self.count % RETEST_EVERY == 0:
            self.retests.append((now_s, index))
        return index, 0

    def keep(self, index: int, repeat: int, measured: dict[str, Any]) -> None:
        """Journal the row of a point on rank 0."""
        if self.lead:
            facts: dict[str, Any] = {
                "family": "collective",
                "gpu": self.order.gpu,
                "stack": stack(),
            }
            facts |= {"timer": "with_launch", "threads": 1, "cache": "warm", "repeat": repeat}
            facts |= {"run_id": self.order.run_id, "key": self.key(index, repeat)}
            self.journal.append([{**asdict(self.points[index]), **facts, **measured}])


def measure(point: Any, device: str, anchor: Anchor | None) -> dict[str, Any]:
    """Time of the slowest rank; a collective the backend lacks is a row, too."""
    begin = time.monotonic()
    before_us = anchor.time_us() if anchor else 0.0
    try:
        timing = time_together(families()["collective"].build(point, device).run, device)
    except (RuntimeError, NotImplementedError) as exc:
        failed = {"status": "unsupported", "reason": str(exc)[:200]}
        return {**failed, "cost_s": time.monotonic() - begin}
    row = {**asdict(timing), "status": "ok", "reason": ""}
    if anchor:
        row["anchor_us"] = slowest([(before_us * anchor.time_us()) ** 0.5])[0]
    return {**row, "cost_s": time.monotonic() - begin}


def run(order: WorkerOrder) -> None:
    """Measure until the budget is spent; every tenth point again, far apart in time."""
    import torch  # lazy: the parent must not pay for it

    torch.set_num_threads(1)
    keep_freed_memory()
    rank, world_size = join(order.device)
    points = [
        replace(p, world_size=world_size, ranks_per_node=world_size, node=order.gpu)
        for p in islice(families()["collective"].sweep(), POINTS)
    ]
    sweep = CollectiveSweep(order, points, rank)
    anchor = Anchor() if order.device == "cpu" else None
    begin = time.monotonic()
    while True:
        chosen, repeat = sweep.choose(time.monotonic() - begin)
        index = agree(chosen)
        if index == STOP:
            break
        sweep.keep(index, repeat, measure(points[index], order.device, anchor))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    run(WorkerOrder(**{**fields, "families": tuple(fields["families"])}))
