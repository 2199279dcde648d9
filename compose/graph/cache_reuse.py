"""Estimates from reuse distances how much of each call's memory is read from beyond the cache."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.switches import is_on
from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.programs.program import launch_order
from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.graph.lifetimes import last_uses
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.memory.traffic import held_share

# A freed block is reused for a tensor of at least 1 / this of the block's size.
MAX_BLOCK_OVER_TENSOR: float = assumed(__file__, "max_block_over_tensor")
MIB = 2.0**20
LAST_CACHE_FRAC: float = assumed(__file__, "last_cache_frac")


@cached_by_identity
def cold_share(gpu: Gpu, ranks: int = 1) -> Callable[..., float]:
    """Returns which share of the difference between its warm and its cold row an op takes longer.

    A function of the bytes touched since its data were last used, of the bytes that it touches
    itself, and of the share of the data whose second use this is since they were in memory. Its
    warm row was measured in a loop, in which its own bytes lie between two of many uses. Of a CPU's
    ``ranks``, which share its caches, each touches as many.

    Interpolated in log(bytes) where the device states a measured curve; else what the last cache
    no longer holds (``held_share``).
    """

    def curve(stated: Mapping[str, float]) -> Callable[[float], float]:
        pairs = sorted((float(mib) * MIB, share) for mib, share in stated.items())
        sizes, shares = np.log([s for s, _ in pairs]), [share for _, share in pairs]

        @lru_cache(maxsize=2**16)
        def lost(distance: float) -> float:
            if not pairs:
                return 1.0 - float(held_share(distance, gpu))
            return float(np.interp(np.log(max(distance, 1.0)), sizes, shares))

        return lost

    later, second_use = curve(gpu.cold_share), curve(gpu.cold_share_second or gpu.cold_share)

    def share(distance: float, own_bytes: float, second: float = 0.0) -> float:
        warm, away = later(own_bytes * ranks), distance * ranks
        lost = later(away) + second * (second_use(away) - later(away))
        return max(0.0, lost - warm) / (1.0 - warm) if warm < 1.0 else 1.0

    return share


# When memory was last touched, as the bytes touched until then, and the share of it that came from
# beyond the caches then.
Use = tuple[float, float]
NEVER: Use = (-math.inf, 0.0)


def from_memory(lost: float) -> float:
    """The share of data that came from memory, by how cold they were."""
    return max(0.0, lost - LAST_CACHE_FRAC) / (1 - LAST_CACHE_FRAC)


class _Allocator:
    """Freed memory blocks of a caching allocator, reused by best fit."""

    def __init__(self) -> None:
        self.free: list[tuple[int, Use]] = []  # (bytes, last use), by bytes

    def allocate(self, nbytes: int) -> Use:
        """Takes a block; returns its last use."""
        index = bisect_left(self.free, (nbytes, NEVER))
        if index < len(self.free) and self.free[index][0] <= MAX_BLOCK_OVER_TENSOR * nbytes:
            return self.free.pop(index)[1]
        return NEVER

    def release(self, nbytes: int, use: Use) -> None:
        """Gives a block back after its tensor's last use."""
        insort(self.free, (nbytes, use))


def cold_fractions(capture: StepCapture, gpu: Gpu, ranks: int = 1) -> list[float]:
    """Returns, per call, the byte-weighted cold share of the memory it reads and writes.

    ``ranks``: processes of the plan that run on this CPU, each with such a step.

    Some caches keep what is used a second time: data that came from memory are cold again sooner.
    The reuse distance of a tensor is the bytes that all calls touched since its memory was last
    touched, in the steady state: two identical steps in a row, of which the second is reported. A
    tensor made within the step takes a freed block and frees it after its last use; a tensor that
    exists before the step (parameters, state, inputs) keeps its own memory.

    A call touches its tensors one element after the other. On a CPU an element is counted as
    touched in the middle of its calls: of two passes over a list larger than the cache the second
    finds nothing in it. The assumed distances of GPUs hold from the end of a call. Of a call that
    is repeated in the step it is the mean.
    """
    if not is_on("cache_reuse"):
        return [1.0] * len(capture.calls)
    share, allocator = cold_share(gpu, ranks), _Allocator()
    used: dict[int, Use] = {}  # storage -> its last use
    clock = 0.0  # bytes touched so far
    result = [0.0] * len(capture.calls)
    on_cpu, twice = gpu.kind == "cpu", bool(gpu.cold_share_second)  # else once is as twice
    touching, order = list(_touching(capture.calls)), launch_order(capture.calls)
    for lap in range(2):
        for number in order:
            total, tensors = touching[number]
            cold = 0.0
            middle = clock + total / 2 if on_cpu else clock
            at = middle if on_cpu else clock + total
            for storage, nbytes, makes, _ in tensors:
                if makes:
                    used[storage] = allocator.allocate(nbytes)
                last, second = used.get(storage, NEVER)
                if lap:
                    cold += nbytes * share(middle - last, total, second)
                known = twice and (lap or last > -math.inf)  # else what the step before did is not
                used[storage] = at, from_memory(share(middle - last, 0.0)) if known else 0.0
            if lap:
                result[number] += cold / total if total else 0.0
            clock += total
            for storage, nbytes, _, frees in tensors:
                if frees:
                    allocator.release(nbytes, used[storage])
    times = Counter(order)
    return [total / max(1, times[number]) for number, total in enumerate(result)]


Touch = tuple[int, int, bool, bool]  # storage, bytes, whether a call makes it, whether it frees it


def _touching(calls: Sequence[OpCall]) -> Iterator[tuple[float, list[Touch]]]:
    """The bytes that each call touches, and the storages."""
    made, last_use = _made(calls), last_uses(calls)
    for number, call in enumerate(calls):
        sizes = {t.storage: t.nbytes for t in call.touched if t.nbytes}
        tensors = [
            (s, n, made.get(s) == number, s in made and last_use[s] == number)
            for s, n in sizes.items()
        ]
        yield float(sum(sizes.values())), tensors


def _made(calls: Sequence[OpCall]) -> dict[int, int]:
    """Index of the call that makes a storage, of those that are made within the step."""
    made, used = dict[int, int](), set[int]()
    for number, call in enumerate(calls):
        used |= {t.storage for t in call.tensors()}
        made |= {t.storage: number for t in call.outputs if t.storage not in used}
        used |= {t.storage for t in call.outputs}
    return made
