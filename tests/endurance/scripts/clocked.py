"""Runs a script whose optimizer's steps are timed: ``torchrun clocked.py OUT STEPS SCRIPT ARGS``.

Rank 0 writes to OUT the time in us between the ends of two optimizer steps, for all but the first.
Then every rank leaves. Of optimizers that step inside others the first to end is timed.
"""

import json
import os
import runpy
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

out, wanted = Path(sys.argv[1]), int(sys.argv[2])
ends: list[float] = []
timed: list[object] = []


def ended(optimizer: object, *_: object) -> None:
    """Note when a step ends; leave after the last."""
    timed.append(optimizer)
    if optimizer is not timed[0]:
        return
    ends.append(time.perf_counter())
    if len(ends) > wanted:
        if os.environ["RANK"] == "0":
            out.write_text(json.dumps([1e6 * (b - a) for a, b in pairwise(ends)]))
        torch.distributed.barrier()
        os._exit(0)


torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
register_optimizer_step_post_hook(ended)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
