"""Estimates from reuse distances how much of each call's memory is read from beyond the cache."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

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
    """Returns a function for how cold an op's data are: 0 as measured warm, 1 as measured cold.

    Its arguments: bytes touched since the data were last used; bytes that the op touches itself
    (its warm row was measured in a loop, in which these lie between two of many uses); the share of
    the data that came from memory at their last use. ``ranks`` of a CPU share its caches: each
    touches as many bytes.

    Interpolated in log(bytes) where the device states a measured curve; else what the last cache
    no longer holds (``held_share``).
    """

    def curve(stated: Mapping[str, float]) -> Callable[[float], float]:
        """Interpolates ``stated`` (cold share by MiB) as a function of bytes since last use."""
        pairs = sorted((float(mib) * MIB, share) for mib, share in stated.items())
        sizes, shares = np.log([s for s, _ in pairs]), [share for _, share in pairs]

        @lru_cache(maxsize=2**16)
        def cold(distance_bytes: float) -> float:
            if not pairs:
                return float(1.0 - held_share(distance_bytes, gpu))
            return float(np.interp(np.log(max(distance_bytes, 1.0)), sizes, shares))

        return cold

    cold_after = curve(gpu.cold_share)
    cold_after_memory = curve(gpu.cold_share_second or gpu.cold_share)  # of data just come from it

    def share(distance_bytes: float, own_bytes: float, from_memory_frac: float = 0.0) -> float:
        warm, bytes_between = cold_after(own_bytes * ranks), distance_bytes * ranks
        often_used, second_use = cold_after(bytes_between), cold_after_memory(bytes_between)
        cold_frac = often_used + from_memory_frac * (second_use - often_used)
        return max(0.0, cold_frac - warm) / (1.0 - warm) if warm < 1.0 else 1.0

    return share


# When memory was last touched, as the bytes touched until then, and the share of it that came from
# beyond the caches then.
Use = tuple[float, float]
NEVER: Use = (-math.inf, 0.0)


def from_memory(cold: float) -> float:
    """The share of data that came from memory, not from the last cache: 0 up to LAST_CACHE_FRAC."""
    return max(0.0, cold - LAST_CACHE_FRAC) / (1 - LAST_CACHE_FRAC)


class _Allocator:
    """Freed memory blocks of a caching allocator, reused by best fit."""

    def __init__(self) -> None:
        self.free: list[tuple[int, Use]] = []  # (bytes, last use), by bytes

    def allocate(self, nbytes: int) -> Use:
        """Takes the smallest free block that fits; returns its last use, NEVER for new memory."""
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

    Some caches favour data used at least twice: data that just came from memory are cold sooner.
    The reuse distance of a tensor is the bytes that all calls touched since its memory was last
    touched, in the steady state: two identical steps in a row, of which the second is reported. A
    tensor made within the step takes a freed block and frees it after its last use; a tensor that
    exists before the step (parameters, state, inputs) keeps its own memory.

    A call touches its tensors one element after the other. On a CPU an element is counted as
    touched in the middle of its calls: of two passes over a list larger than the cache the second
    finds nothing in it. The assumed distances of GPUs hold from the end of a call. A call that is
    repeated in the step has the mean of its repetitions.
    """
    if not is_on("cache_reuse"):
        return [1.0] * len(capture.calls)
    share, allocator = cold_share(gpu, ranks), _Allocator()
    last_use: dict[int, Use] = {}  # by storage
    clock = 0.0  # bytes touched so far
    result = [0.0] * len(capture.calls)
    on_cpu, second_use_differs = gpu.kind == "cpu", bool(gpu.cold_share_second)
    touches_of, order = list(_touches(capture.calls)), launch_order(capture.calls)
    for is_second_step in (False, True):
        for number in order:
            touches = touches_of[number]
            total = float(sum(touch.nbytes for touch in touches))
            cold_bytes = 0.0
            read_at = clock + total / 2 if on_cpu else clock
            written_at = read_at if on_cpu else clock + total
            for storage, nbytes, makes, _ in touches:
                if makes:
                    last_use[storage] = allocator.allocate(nbytes)
                last, second = last_use.get(storage, NEVER)
                if is_second_step:
                    cold_bytes += nbytes * share(read_at - last, total, second)
                # What the step before did with a storage is not known in the first step.
                is_known = second_use_differs and (is_second_step or last > -math.inf)
                came = from_memory(share(read_at - last, 0.0)) if is_known else 0.0
                last_use[storage] = written_at, came
            if is_second_step:
                result[number] += cold_bytes / total if total else 0.0
            clock += total
            for storage, nbytes, _, frees in touches:
                if frees:
                    allocator.release(nbytes, last_use[storage])
    times = Counter(order)
    return [total / max(1, times[number]) for number, total in enumerate(result)]


class _Touch(NamedTuple):
    """A storage that a call touches, and whether the call makes or frees it."""

    storage: int
    nbytes: int
    makes: bool
    frees: bool


def _touches(calls: Sequence[OpCall]) -> Iterator[list[_Touch]]:
    """The storages that each call touches."""
    maker, last_use = _makers(calls), last_uses(calls)
    for number, call in enumerate(calls):
        sizes = {t.storage: t.nbytes for t in call.touched if t.nbytes}
        yield [
            _Touch(
                storage=s,
                nbytes=nbytes,
                makes=maker.get(s) == number,
                frees=s in maker and last_use[s] == number,
            )
            for s, nbytes in sizes.items()
        ]


def _makers(calls: Sequence[OpCall]) -> dict[int, int]:
    """The index of the call that first writes each storage that the step itself makes."""
    maker_of, used = dict[int, int](), set[int]()
    for number, call in enumerate(calls):
        used |= {t.storage for t in call.tensors()}
        maker_of |= {t.storage: number for t in call.outputs if t.storage not in used}
        used |= {t.storage for t in call.outputs}
    return maker_of
