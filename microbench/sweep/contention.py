"""How much a message and compute slow each other on two ranks of this machine.

A product beside an all_reduce on each of two ranks of a CPU, against either alone. Both proceed at
1/contention of their speed while they overlap: 1 where they do not hinder each other, 2 where they
share one core.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from microbench.processes.ranks import join, slowest, start_ranks

RANKS = 2
SIZES_MIB = (1, 4, 16)  # of gradient buckets
REPETITIONS = 7
LEAST_SHARE = 0.1  # both must take a while for their overlap to tell


def factor(compute_us: float, message_us: float, both_us: float) -> float:
    """From both = longer + (contention - 1) * shorter (``compose.pricing.work``); from 1 to 3."""
    longer, shorter = max(compute_us, message_us), min(compute_us, message_us)
    return min(3.0, max(1.0, 1 + (both_us - longer) / shorter))


def measure_contention() -> float:
    """Median over bucket sizes, measured on two ranks of one thread each; about five seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "contention.json"
        code = start_ranks("microbench.sweep.contention", {"path": str(path)}, RANKS).wait()
        if code or not path.is_file():
            raise RuntimeError(f"measuring contention failed with code {code}; see above")
        return float(json.loads(path.read_text()))


def _on_rank() -> float:
    """This rank's part of the measurement; all ranks find the same."""
    import torch  # lazy: the parent does not need it
    import torch.distributed as dist

    torch.set_num_threads(1)
    join("cpu")
    a = torch.randn(256, 256)

    def typical_us(run: Callable[[], object]) -> float:
        times = []
        for _ in range(REPETITIONS):
            dist.barrier()
            start = time.perf_counter_ns()
            run()
            times.append((time.perf_counter_ns() - start) / 1e3)
        return statistics.median(slowest(times))

    found = []
    for mib in SIZES_MIB:
        bucket = torch.zeros(mib * 2**18)

        def reduce(bucket: Any = bucket) -> None:
            dist.all_reduce(bucket)

        reduce()
        message_us = typical_us(reduce)
        one_us = typical_us(lambda: torch.mm(a, a))
        count = max(1, round(message_us / one_us))

        def compute(count: int = count) -> None:
            for _ in range(count):
                torch.mm(a, a)

        def both(bucket: Any = bucket, compute: Callable[[], None] = compute) -> None:
            work: Any = dist.all_reduce(bucket, async_op=True)
            compute()
            work.wait()

        found.append(factor(typical_us(compute), message_us, typical_us(both)))
    dist.destroy_process_group()
    return statistics.median(found)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        contention, order = _on_rank(), json.loads(sys.argv[1])
        Path(order["path"]).write_text(json.dumps(contention))
    else:
        print(f"{measure_contention():.2f}")
