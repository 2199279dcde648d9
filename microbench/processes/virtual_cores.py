"""Waits, before something is timed, until a shared machine runs its virtual cores apart.

Two virtual cores can be two threads of one core, most of all after a time with little work: both
together are then as fast as one. Under load such a machine moves them apart within seconds.
"""

from __future__ import annotations

import math
import statistics
import time

from itercast.capture.base.slow_imports import dist, torch
from itercast.microbench.processes.ranks import max_over_ranks

SIZE = 384  # rows and columns of the product
APART = 1.4  # no assumption: speed-up by all cores; 1.0 where two are one, 2.0 where they are two
MOST_WAIT_S = 10.0
MOST_WAIT_FRAC = 0.1  # no assumption: of a sweep's time
LOAD_S = 0.25  # between two looks


class VirtualCores:
    """The cores of this process, or of so many ``ranks`` of its group, which wait together.

    They wait ten seconds at most over all calls, and a tenth of a sweep's ``budget_s``.
    """

    def __init__(self, ranks: int = 1, budget_s: float = math.inf) -> None:
        self.ranks = ranks
        self.wait_left_s = min(MOST_WAIT_S, MOST_WAIT_FRAC * budget_s)
        self._matrix = torch.randn(SIZE, SIZE)

    def settle(self) -> None:
        """Keep all cores busy until they are ``APART`` times as fast as one, or time is up."""
        several = self.ranks > 1 or torch.get_num_threads() > 1
        while several and self.wait_left_s > 0:
            begin_s = time.monotonic()
            alone_s, together_s = self.times_s()
            if self.ranks * alone_s >= APART * together_s:
                return
            self._load(begin_s + LOAD_S)
            self.wait_left_s -= self._of_all(time.monotonic() - begin_s)

    def times_s(self) -> tuple[float, float]:
        """Time of a product on one thread of one rank, and on all threads of all ranks at once."""
        threads, alone_s = torch.get_num_threads(), 0.0
        torch.set_num_threads(1)
        for rank in range(self.ranks):
            if self.ranks > 1:
                dist.barrier()
            if self.ranks == 1 or rank == dist.get_rank():
                alone_s = self._product_s()
        torch.set_num_threads(threads)
        if self.ranks > 1:
            dist.barrier()
        return self._of_all(alone_s), self._of_all(self._product_s())

    def _load(self, until_s: float) -> None:
        """Keep the cores busy, so that the machine moves them apart."""
        while time.monotonic() < until_s:
            torch.mm(self._matrix, self._matrix)

    def _product_s(self) -> float:
        """Median of three runs after three untimed ones."""
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            torch.mm(self._matrix, self._matrix)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[3:])

    def _of_all(self, seconds: float) -> float:
        """The longest of all ranks."""
        return max_over_ranks([seconds])[0] if self.ranks > 1 else seconds
