"""One process, or one rank of several, that measures iterations and journals the rows."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from microbench import store
from microbench.cases.registry import case
from microbench.collect import stack
from microbench.iterations import Iteration, measure
from microbench.ranks import join
from microbench.timing import Anchor, keep_freed_memory


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


def iteration_key(order: IterationOrder, asked: Iteration) -> str:
    """Key of an iteration's row."""
    row = {"family": "iteration", "gpu": order.gpu, "threads": order.threads, "cache": "warm"}
    return store.point_key({**row, "repeat": order.repeat, "point": asdict(asked)})


def run(order: IterationOrder) -> None:
    """Measure one after the other; rank 0 writes."""
    import torch  # lazy: the parent must not pay for it

    torch.set_num_threads(order.threads)
    torch.manual_seed(0)
    rank = 0
    if order.device == "cpu":
        keep_freed_memory()
    if order.ranks > 1:
        rank, _ = join(order.device)
    anchor = Anchor().times_us if order.device == "cpu" else None
    journal = store.Journal(Path(order.root), order.run_id) if rank == 0 else None
    common: dict[str, Any] = {
        "family": "iteration",
        "gpu": order.gpu,
        "stack": stack(),
        "timer": "with_launch",
    }
    common |= {"threads": order.threads, "repeat": order.repeat, "run_id": order.run_id}
    for asked in order.iterations:
        measured = measure(case(asked.case), asked, order.device, anchor=anchor)
        if journal is not None:
            journal.append([{**common, "key": iteration_key(order, asked), **measured}])
    if order.ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    fields: dict[str, Any] = json.loads(sys.argv[1])
    asked = tuple(Iteration(**one) for one in fields["iterations"])
    run(IterationOrder(**{**fields, "iterations": asked}))
