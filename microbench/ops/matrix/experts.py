"""A mixture of experts' products as one op: every token goes through some of many networks.

Serving software and libraries run them in one or two kernels. A captured step has the products of
``gemm`` (``grouped_mm``) and the ops around them instead, so no call is described by this family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Numbers,
    Tensor,
    Values,
    Workload,
    by_name,
    is_any,
    itemsize_bytes,
    log_uniform,
    repeated,
    torch_dtype,
)
from itercast.microbench.ops.matrix.expert_loads import Column, Count, summed
from itercast.microbench.ops.sizes import MAX_ROWS, resize_along
from itercast.microbench.slow_imports import torch

# Products with matrices of hidden x inner numbers, by op.
MATRICES = {"layer": 3, "gate_up": 2, "down": 1, "down_full": 3}
DOWN = ("down", "down_full")
TILES = ((16, 64), (64, 128), (128, 128))
FLOOR_ROWS = 16  # of the tiles that ``floor_us`` counts
RESULT_BYTES = 2  # of a number that a product writes, at least
KERNEL_US: float = assumed(__file__, "kernel_us")
MAX_FLOPS = 2e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """``tokens`` vectors of ``hidden`` numbers, each sent to ``topk`` of ``experts`` networks.

    ``op`` is layer (gate and up, activation, down, weighted sum), or one of its products: gate_up
    (hidden to 2 x inner), down (inner to hidden) or down_full (down with both gradients). A rank
    holds ``local`` of the experts, with ``inner`` of their width. ``skew`` is the exponent of a
    power law of tokens over experts (``expert_loads``), of whose ranks the busiest is meant; 0:
    each gets as many.
    """

    op: str
    tokens: int
    hidden: int
    inner: int
    experts: int
    topk: int
    local: int
    skew: float = 0.0
    dtype: str = "fp32"


def sweep() -> Iterator[Experts]:
    """Yields points without end: 4 to 128 experts, all of them on one rank."""
    rng = np.random.default_rng(19)
    while True:
        experts = 2 ** int(rng.integers(2, 8))
        p = Experts(
            op=str(rng.choice(list(MATRICES))),
            tokens=log_uniform(rng, 8, 4096),
            hidden=64 * log_uniform(rng, 1, 64),
            inner=64 * log_uniform(rng, 1, 64),
            experts=experts,
            topk=int(rng.choice([1, 2, 4, 8])) if experts >= 8 else 2,
            local=experts,
        )
        if flops(p) <= MAX_FLOPS and bytes_moved(p) <= 2e8:
            yield p


def build(p: Experts, device: str) -> Workload:
    """Tokens in the order of their experts, equal shares; all experts on this device."""
    if p.skew or p.local != p.experts:
        raise NotImplementedError("experts are timed with equal shares and all on one device")
    if device == "cuda" and p.dtype != "bf16":
        raise NotImplementedError("experts are timed in bf16 alone: others wait for the host")

    def operand(*shape: int) -> Tensor:
        return repeated(torch.randn, shape, device).to(torch_dtype(p.dtype))

    pairs = p.tokens * p.topk
    ends = torch.linspace(0, pairs, p.experts + 1, device=device)[1:].to(torch.int32)
    source = torch.arange(pairs, device=device) % p.tokens
    x, wide = operand(p.tokens, p.hidden), operand(pairs, p.inner)
    up, down = operand(p.experts, p.hidden, 2 * p.inner), operand(p.experts, p.inner, p.hidden)

    def layer() -> Tensor:
        gate, other = torch._grouped_mm(x[source], up, ends).chunk(2, dim=-1)
        y = torch._grouped_mm(torch.nn.functional.silu(gate) * other, down, ends)
        return torch.zeros_like(x).index_add_(0, source, y)

    def full() -> tuple[Tensor, ...]:
        y = torch._grouped_mm(wide.requires_grad_(), down.requires_grad_(), ends)
        return torch.autograd.grad(y, (wide, down), torch.ones_like(y))

    runs = {
        "layer": layer,
        "gate_up": lambda: torch._grouped_mm(x[source], up, ends),
        "down": lambda: torch._grouped_mm(wide, down, ends),
        "down_full": full,
    }
    return Workload(run=runs[p.op], through_aten=False)


def _matrices(p: Experts) -> Numbers:
    return sum(np.asarray(is_any(p.op, (op,))) * count for op, count in MATRICES.items())


def pairs(p: Experts) -> Numbers:
    """Tokens of all local experts together, on the busiest rank."""
    return _sums(p)["pairs"]


def used(p: Experts) -> Numbers:
    """Local experts that get a token, as expected: each token picks one with chance load / tokens.

    local * (1 - (1 - topk/experts)^tokens) where experts are equally popular.
    """
    return _sums(p)["used"]


def _sums(p: Experts) -> dict[str, Column]:
    """Sums over the experts of the busiest rank: pairs, used experts, tiles by rows of a tile."""
    counts: dict[str, Count] = {
        "pairs": lambda loads, _: loads,
        "used": _picked,
    }
    counts |= {f"tiles_{rows}": partial(_tiles, rows) for rows, _ in TILES}
    return summed(p, counts)


def _picked(loads: Column, tokens: float) -> Column:
    """Chance that any token picks an expert of this load."""
    return 1.0 - (1.0 - np.minimum(1.0, loads / tokens)) ** tokens


def _tiles(rows: int, loads: Column, tokens: float) -> Column:
    """Tiles of so many rows that an expert's tokens fill, as expected."""
    picked = np.maximum(_picked(loads, tokens), 2**-40)
    return picked * np.ceil(loads / picked / rows)


def flops(p: Experts) -> Numbers:
    """2 * hidden * inner for each matrix of a token's expert."""
    return 2.0 * pairs(p) * p.hidden * p.inner * _matrices(p)


def bytes_moved(p: Experts) -> Values:
    """Lower bound: weights of the experts that are used, and the tokens in and out.

    All of them once, for down_full three times: the product and its two gradients.
    """
    weights = used(p) * p.hidden * p.inner * _matrices(p)
    out = np.where(np.asarray(is_any(p.op, ("gate_up",))), 2.0 * p.inner, 1.0 * p.hidden)
    into = np.where(np.asarray(is_any(p.op, DOWN)), 1.0 * p.inner, 1.0 * p.hidden)
    times = np.where(np.asarray(is_any(p.op, ("down_full",))), 3.0, 1.0)
    tokens = times * pairs(p) * (into + out)
    return (weights + tokens) * itemsize_bytes(p.dtype)


def floor_us(p: Experts, gpu: Gpu) -> Numbers:
    """Time of the kernels one after the other, each as long as its flops or its bytes take.

    Of a layer: tokens are sorted by expert, gate and up, activation, down, weighted sum. Every
    expert's tokens fill whole tiles of FLOOR_ROWS rows; products write 16 bit or more.
    """
    sums, item = _sums(p), itemsize_bytes(p.dtype)
    rate = by_name(p.dtype, {name: gpu.full_rate(name) for name in np.unique(p.dtype)})
    count, tokens, hidden, inner = sums["pairs"], 1.0 * p.tokens, p.hidden, p.inner
    flops_us = 1e6 * 2 * sums[f"tiles_{FLOOR_ROWS}"] * FLOOR_ROWS * hidden * inner / rate
    read, weights = np.minimum(count, tokens) * hidden * item, sums["used"] * hidden * inner * item
    result = np.maximum(item, RESULT_BYTES)
    wide, out = count * inner * item, count * hidden * result

    def stage(bytes_moved: Numbers, products: float = 0.0) -> Values:
        memory_us = 1e6 * bytes_moved / gpu.hbm_bytes_per_s
        return np.maximum(memory_us, products * flops_us) + KERNEL_US

    gate_up = stage(2 * weights + read + 2 * count * inner * result, 2)
    down = stage(weights + wide + out, 1)
    whole = tokens * hidden * result
    around = stage(whole + read) + stage(2 * count * inner * result + wide)
    found = {
        "layer": around + gate_up + down + stage(out + whole),
        "gate_up": gate_up,
        "down": down,
        "down_full": 3 * down,
    }
    return sum(np.where(is_any(p.op, (op,)), us, 0.0) for op, us in found.items())


def features(p: Experts, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, tokens of an expert, and waves of tiles as kernels cut the first product.

    How many experts other ranks hold no kernel sees: no feature says it.
    """
    sums = _sums(p)
    found = {
        "op": p.op,
        "dtype": p.dtype,
        "log_pairs": np.log2(np.maximum(sums["pairs"], 2**-10)),
        "log_whole": np.log2(p.tokens / np.maximum(sums["pairs"], 2**-10)),
        "log_hidden": np.log2(p.hidden),
        "log_inner": np.log2(p.inner),
        "log_used": np.log2(np.maximum(sums["used"], 2**-10)),
        "log_each": np.log2(np.maximum(1.0, sums["pairs"] / np.maximum(sums["used"], 1e-9))),
        "topk": p.topk,
        "skew": p.skew,
    }
    for rows, cols in TILES:
        tiles = sums[f"tiles_{rows}"] * np.ceil(2.0 * p.inner / cols)
        found[f"log_waves_{rows}x{cols}"] = np.log2(np.maximum(tiles, 2**-10) / gpu.sm_count)
    return found


FAMILY = Family(
    name="experts",
    params=Experts,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    floor_us=floor_us,
    answers={},
    tiled=True,
    matmul=True,
    on_demand=True,
    gpu_sweep=GpuSweep(
        resize=resize_along({"tokens": MAX_ROWS}),
        slow_frac=0.1,
        compute_bound=True,
    ),
)
