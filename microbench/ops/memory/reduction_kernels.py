"""What torch's kernels of scans and losses do on a GPU, beside reading and writing their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, log2

from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Part
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.memory.instructions import copy_with_instructions

LOSS_PASSES: Mapping[str, int] = assumed(__file__, "loss_passes")
SCAN: Mapping[str, int] = assumed(__file__, "scan")
NLL: Mapping[str, int] = assumed(__file__, "nll")


def loss_part(op: str, results: int, size: int, itemsize: int) -> Part:
    """A loss of two tensors: a pointwise kernel, and one that sums what it wrote.

    ``size`` elements are summed into each of ``results``; with one there is no sum.
    """
    summed = size > 1 or op.endswith("backward")
    passes = LOSS_PASSES[op] - (0 if summed else 1)
    return memory_copy(passes * results * size * itemsize)


def nll_waits(rows: int) -> int:
    """Waits of an nll_loss forward: one block sums all rows, reading a target and then its class.

    The block has 2**round(log2(rows / 16)) threads, within bounds; each takes a row at a time.
    """
    wanted: int = 1 << round(log2(max(1, rows // NLL["rows_per_thread"])))
    threads = min(max(wanted, NLL["least_threads"]), NLL["most_threads"])
    return NLL["reads"] * ceil(rows / threads)


def scan_part(outer: int, size: int, inner: int, itemsize: int, gpu: Gpu) -> Part:
    """A cumulative sum or product of rows; a block of threads goes along its rows in chunks.

    A chunk has two elements for each thread of a row; it is read, summed by a tree in shared
    memory and written before the next one starts. Columns are summed by a thread each, a single
    row by many blocks at the rate of a copy.
    """
    moved = 2 * outer * size * inner * itemsize
    if outer * inner == 1:
        return memory_copy(moved)
    if inner > 1:
        return replace(memory_copy(moved), waits=size)
    threads = scan_threads(outer, size)
    blocks = ceil(outer * threads / SCAN["block_threads"])
    crowded = ceil(blocks / gpu.sm_count) * gpu.sm_count / blocks  # the fullest SM over the mean
    steps = ceil(size / (2 * threads))
    chunk = SCAN["instructions"] + SCAN["instructions_of_level"] * (1 + int(log2(threads)))
    instructions = crowded * blocks * SCAN["block_threads"] * steps * chunk
    return replace(copy_with_instructions(moved, instructions, gpu), waits=steps)


def scan_threads(rows: int, size: int) -> int:
    """Threads along a row: as many more than across rows as a row is longer than there are rows.

    2**((9 + log2 size - log2 rows) // 2), a power of two between 16 and 512.
    """
    power = (SCAN["log2_block_threads"] + (size - 1).bit_length() - (rows - 1).bit_length()) // 2
    least, most = SCAN["log2_least_threads"], SCAN["log2_block_threads"]
    return int(2 ** min(max(power, least), most))
