"""Products that torch.compile pads: sides made whole multiples of what tensor cores load at once.

inductor times a product as it is and with padded copies of its operands, and takes the latter where
it is faster (``shape_padding``, on by default).
Source: torch/_inductor/fx_passes/pad_mm.py in https://github.com/pytorch/pytorch.
"""

from __future__ import annotations

from dataclasses import replace

from itercast.microbench.ops.family import Part, itemsize_bytes
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.memory.elementwise import memory_copy

ALIGNMENT = {"bf16": 8, "fp16": 8, "fp32": 4, "tf32": 4}  # get_alignment_size_dtype
LEAST_GAIN = 1.1  # no assumption: is_padded_faster


def is_paddable(p: object) -> bool:
    """Whether an op is a product with a side that inductor may pad."""
    return isinstance(p, Gemm) and p.op in ("mm", "addmm", "bmm") and _padded(p) != p


def padded_parts(p: Gemm) -> list[Part]:
    """The padded product, and a copy of each operand that grows."""
    padded = _padded(p)
    copied_numel = []
    if (padded.m, padded.k) != (p.m, p.k):
        copied_numel.append(p.batch * p.m * p.k)
    if (padded.k, padded.n) != (p.k, p.n):
        copied_numel.append(p.batch * p.k * p.n)
    item_bytes = float(itemsize_bytes(p.dtype))
    copies = [memory_copy(2 * numel * item_bytes) for numel in copied_numel]  # read and written
    return [Part(family="gemm", params=padded), *copies]


def _padded(p: Gemm) -> Gemm:
    """The product with m, n and k rounded up to the dtype's alignment; vectors stay vectors."""
    unit = ALIGNMENT.get(p.dtype, 1)
    m, n, k = (x if x == 1 else -(-x // unit) * unit for x in (p.m, p.n, p.k))
    return replace(p, m=m, n=n, k=k)
