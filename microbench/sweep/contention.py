"""Measures contention: how much an all_reduce and compute slow each other on this CPU.

On two ranks, a matrix product runs beside an all_reduce, and each alone. While they overlap both
run at 1/contention of their speed: 1 if they do not slow each other, 2 if they share one core.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import dist, torch
from itercast.microbench.processes.ranks import join_process_group, max_over_ranks, start_ranks
from itercast.microbench.processes.virtual_cores import VirtualCores

RANKS = 2
SIZES_MIB = (1, 4, 16)  # of gradient buckets
REPETITIONS = 7
MOST: float = assumed(__file__, "most")


def factor(compute_us: float, message_us: float, both_us: float) -> float:
    """Contention from the times alone and together, clipped to 1..``MOST``.

    together = longer + (contention - 1) * shorter, as in ``itercast.compose.pricing.work``.
    """
    longer, shorter = max(compute_us, message_us), min(compute_us, message_us)
    return min(MOST, max(1.0, 1 + (both_us - longer) / shorter))


def measure_contention() -> float:
    """Median contention over bucket sizes, on two ranks of one thread each; takes five seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "contention.json"
        code = start_ranks(
            "itercast.microbench.sweep.contention", {"path": str(path)}, RANKS
        ).wait()
        if code or not path.is_file():
            raise RuntimeError(f"measuring contention failed with code {code}; see above")
        return float(json.loads(path.read_text()))


def _on_rank() -> float:
    """Measure on this rank; the result is the same on all ranks."""
    torch.set_num_threads(1)
    join_process_group("cpu")
    VirtualCores(RANKS).settle()
    factors = [_beside(torch.zeros(mib * 2**18)) for mib in SIZES_MIB]
    dist.destroy_process_group()
    return statistics.median(factors)


def _beside(bucket: torch.Tensor) -> float:
    """Contention of the all_reduce of a bucket and products that take about as long."""
    a = torch.randn(256, 256)
    reduce, product = partial(dist.all_reduce, bucket), partial(torch.mm, a, a)
    reduce()
    message_us = _typical_us(reduce)
    count = max(1, round(message_us / _typical_us(product)))

    def compute() -> None:
        for _ in range(count):
            product()

    def overlapped() -> None:
        work = dist.all_reduce(bucket, async_op=True)
        compute()
        work.wait()

    return factor(_typical_us(compute), message_us, _typical_us(overlapped))


def _typical_us(run: Callable[[], object]) -> float:
    """Median time on the slower rank; ranks wait for each other before each run."""
    times_us = []
    for _ in range(REPETITIONS):
        dist.barrier()
        start_ns = time.perf_counter_ns()
        run()
        times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
    return statistics.median(max_over_ranks(times_us))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        contention, order = _on_rank(), json.loads(sys.argv[1])
        Path(order["path"]).write_text(json.dumps(contention))
    else:
        print(f"{measure_contention():.2f}")
