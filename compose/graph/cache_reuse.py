"""How cold a call's memory is: reuse distances over a step, and what a cache makes of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall, StepCapture

FITS = 2.0  # a freed block serves a tensor of at least half its size
MIB = 2.0**20


def cold_share(gpu: Gpu) -> Callable[[float], float]:
    """From bytes touched since the last access to the share of a cold access's extra time.

    Measured where the machine's card states it; else zero below half the last cache, one above one
    and a half, linear between.
    """
    if gpu.cold_share:
        pairs = sorted((float(mib) * MIB, share) for mib, share in gpu.cold_share.items())
        sizes, shares = np.log([s for s, _ in pairs]), [share for _, share in pairs]
        return lambda distance: float(np.interp(np.log(max(distance, 1.0)), sizes, shares))
    return lambda distance: min(1.0, max(0.0, distance / gpu.l2_bytes - 0.5))


class _Allocator:
    """Blocks as a caching allocator hands them out: the best fit among the freed ones."""

    def __init__(self) -> None:
        self.free: list[tuple[int, float]] = []

    def take(self, nbytes: int) -> float:
        """When the block was last touched; -inf for fresh memory."""
        index = bisect_left(self.free, (nbytes, -float("inf")))
        if index < len(self.free) and self.free[index][0] <= FITS * nbytes:
            return self.free.pop(index)[1]
        return -float("inf")

    def give(self, nbytes: int, touched: float) -> None:
        """A block that nobody uses any more."""
        insort(self.free, (nbytes, touched))


def cold_fractions(capture: StepCapture, gpu: Gpu) -> list[float]:
    """Per call, the byte-weighted cold share of the memory it reads and writes.

    Reuse distance: bytes touched by all calls since this memory was last touched, in the steady
    state (the step before this one ran the same calls). A tensor made in the step lies in a block
    that an earlier one left, and leaves it after its last use; what the step only finds stays.
    """
    share = cold_share(gpu)
    made, last_use = _lifetimes(capture.calls)
    allocator = _Allocator()
    touched: dict[int, float] = {}
    clock = 0.0
    result: list[float] = []
    for lap in range(2):
        for number, call in enumerate(capture.calls):
            tensors = {t.storage: t.nbytes for t in (*call.tensors(), *call.outputs) if t.nbytes}
            cold = 0.0
            for storage, nbytes in tensors.items():
                if made.get(storage) == number:
                    touched[storage] = allocator.take(nbytes)
                cold += nbytes * share(clock - touched.get(storage, -float("inf")))
            if lap == 1:
                total = sum(tensors.values())
                result.append(cold / total if total else 0.0)
            clock += sum(tensors.values())
            for storage, nbytes in tensors.items():
                touched[storage] = clock
                if storage in made and last_use[storage] == number:
                    allocator.give(nbytes, clock)
    return result


def _lifetimes(calls: tuple[OpCall, ...]) -> tuple[dict[int, int], dict[int, int]]:
    """Of storages that a call makes: the number of that call, and of the last one using it."""
    made: dict[int, int] = {}
    last_use: dict[int, int] = {}
    for number, call in enumerate(calls):
        for t in call.tensors():
            last_use.setdefault(t.storage, -1)
        for t in call.outputs:
            if t.storage not in last_use:
                made[t.storage] = number
        for t in (*call.tensors(), *call.outputs):
            last_use[t.storage] = number
    return made, last_use
