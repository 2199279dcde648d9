"""Embedding bag: rows of a table, summed bag by bag, and the dense gradient of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall
from microbench.ops.family import (
    Family,
    GpuSweep,
    Workload,
    itemsize_bytes,
    log_uniform,
    torch_dtype,
)
from microbench.ops.sizes import aligned

MODES = ("sum", "mean", "max")  # as numbered by aten
MAX_ELEMENTS = 2**24
RANK_BINS = 48
RECENT = 1024
GPU_DTYPES = {"fp32": 0.88, "bf16": 0.1, "fp16": 0.02}
GPU_BAGS = (512, 8192)
GPU_POOLING = 128  # look-ups of a bag at most
GPU_ROWS = 20_000_000  # of a table at most


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBag:
    """One call that sums ``lookups`` rows of a (rows, dim) table into ``bags``, or its backward.

    ``skew`` is the Zipf exponent of the indices, 0 for uniform; ``repeats`` the share of lookups
    that repeat one of the 1,024 before, as in a trace. A captured call knows neither.
    """

    op: str
    rows: int
    dim: int
    bags: int
    lookups: int
    skew: float = 0.0
    repeats: float = 0.0
    mode: str = "sum"
    dtype: str = "fp32"


def sweep() -> Iterator[EmbeddingBag]:
    """Yields points without end.

    Tables and gathered rows up to 16M elements, 1 to 100 lookups a bag.
    """
    rng = np.random.default_rng(11)
    while True:
        bags = log_uniform(rng, 1, 32768)
        pooling = 1 if rng.random() < 0.25 else log_uniform(rng, 1, 100)
        p = EmbeddingBag(
            op=str(rng.choice(["forward", "backward"])),
            rows=log_uniform(rng, 4, 2**21),
            dim=4 * log_uniform(rng, 1, 128),
            bags=bags,
            lookups=bags * pooling,
            skew=0.0 if rng.random() < 0.5 else round(float(rng.uniform(0.6, 1.3)), 2),
            mode=str(rng.choice(MODES, p=[0.6, 0.3, 0.1])),
        )
        gathered = p.lookups * p.dim * (1 if p.op == "forward" else 4)  # one thread adds gradients
        if p.lookups <= 2**19 and max(p.rows * p.dim, gathered) <= MAX_ELEMENTS:
            yield p


def zipf_indices(p: EmbeddingBag, device: str) -> Any:
    """Random row numbers with P(rank r) ~ r**-skew; popular rows are scattered over the table.

    Drawn on the device by the inverse of the continuous distribution on [1/2, rows + 1/2].
    """
    import torch  # lazy: formulas must import where torch is absent

    u = torch.rand(p.lookups, dtype=torch.float64, device=device)
    low, high, power = 0.5, p.rows + 0.5, 1 - p.skew
    if abs(power) < 1e-6:
        x = low * (high / low) ** u
    else:
        x = (low**power + u * (high**power - low**power)) ** (1 / power)
    rank = x.round().long().clamp(1, p.rows)
    if p.repeats:
        back = torch.randint(1, RECENT + 1, rank.shape, device=device)
        at = (torch.arange(p.lookups, device=device) - back).clamp(min=0)
        rank = torch.where(torch.rand(rank.shape, device=device) < p.repeats, rank[at], rank)
    return rank * _scatter(p.rows) % p.rows


def _scatter(rows: int) -> int:
    """A factor without a common divisor with ``rows``: products modulo rows are a permutation."""
    return next(f for f in range(int(0.618 * rows) + 1, 2 * rows + 1) if gcd(f, rows) == 1)


def build(p: EmbeddingBag, device: str) -> Workload:
    """Tensors for bags of equal length; the backward gets what its forward returned."""
    import torch  # lazy: formulas must import where torch is absent

    aten, mode = torch.ops.aten, MODES.index(p.mode)
    index = zipf_indices(p, device)
    starts = torch.arange(p.bags, device=device) * p.lookups // p.bags
    table = torch.randn(p.rows, p.dim, device=device).to(torch_dtype(p.dtype))
    if p.op == "forward":
        return Workload(run=lambda: aten._embedding_bag(table, index, starts, False, mode))
    _, bag_of, sizes, extremes = aten._embedding_bag(table, index, starts, False, mode)
    grad = torch.randn(p.bags, p.dim, device=device).to(torch_dtype(p.dtype))
    rest = (index, starts, bag_of, sizes, extremes, p.rows, False, mode, False, None)
    return Workload(run=lambda: aten._embedding_bag_backward(grad, *rest))


def flops(p: Any) -> Any:
    """An addition (or comparison) per element of every row looked up, both ways."""
    return 1.0 * p.lookups * p.dim


def bytes_moved(p: Any) -> Any:
    """Forward: a row read per lookup, a row written per bag. Index and offset are int64.

    Backward: bags read, the whole gradient zeroed, a row read and written per lookup.
    """
    backward = np.equal(p.op, "backward")
    rows = p.bags + np.where(backward, 2.0 * p.lookups + p.rows, 1.0 * p.lookups)
    return rows * p.dim * itemsize_bytes(p.dtype) + 8.0 * (p.lookups + p.bags)


def unique_rows(p: Any) -> Any:
    """Expected number of distinct rows: the sum over ranks r of 1 - (1 - p_r)**lookups.

    Lookups that repeat earlier ones do not count.

    p_r = r**-skew / H. Ranks are summed in bins of equal width in log r, so that the cost does not
    grow with the table; for skew 0 it is rows * (1 - (1 - 1/rows)**lookups) exactly.
    """
    fresh = np.maximum(1.0, p.lookups * (1.0 - np.asarray(p.repeats, dtype=float)))
    rows, lookups, skew = (np.asarray(v, dtype=float)[..., None] for v in (p.rows, fresh, p.skew))
    steps = np.arange(RANK_BINS + 1) / RANK_BINS
    edges = 0.5 * (2 * rows + 1) ** steps  # from 1/2 to rows + 1/2
    width = edges[..., 1:] - edges[..., :-1]
    middle = np.sqrt(edges[..., 1:] * edges[..., :-1])
    weight = middle**-skew
    chance = np.minimum(weight / (width * weight).sum(axis=-1, keepdims=True), 1 - 1e-12)
    seen = -np.expm1(lookups * np.log1p(-chance))
    return np.minimum((width * seen).sum(axis=-1), np.minimum(rows, lookups)[..., 0])


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
    """Sizes, pooling, how much of the table is touched and how much of it fits the cache."""
    row_bytes = 1.0 * p.dim * itemsize_bytes(p.dtype)
    unique = unique_rows(p)
    return {
        "op": p.op,
        "mode": p.mode,
        "dtype": p.dtype,
        "skew": p.skew,
        "log_rows": np.log2(p.rows),
        "log_dim": np.log2(p.dim),
        "log_bags": np.log2(p.bags),
        "log_lookups": np.log2(p.lookups),
        "log_pooling": np.log2(p.lookups / p.bags),
        "unique_frac": unique / p.rows,
        "log_reuse": np.log2(p.lookups / unique),
        "log_table_per_cache": np.log2(p.rows * row_bytes / gpu.l2_bytes),
        "log_touched_per_cache": np.log2(unique * row_bytes / gpu.l2_bytes),
        "lines_64": np.ceil(row_bytes / 64),
        "line_fill_128": row_bytes / 128 / np.ceil(row_bytes / 128),
        "log_bags_per_core": np.log2(p.bags / gpu.sm_count),
    }


def from_forward(call: OpCall) -> EmbeddingBag | None:
    """_embedding_bag(table, index, offsets, scale_by_freq, mode, sparse, weights, last_offset)."""
    table, index, starts = call.args[:3]
    mode = _argument(call, 4, "mode", 0)
    bags = starts.numel - int(_argument(call, 7, "include_last_offset", False))
    return _bag("forward", table.shape, bags, index.numel, mode, table.dtype)


def from_backward(call: OpCall) -> EmbeddingBag | None:
    """_embedding_bag_backward(grad, index, offsets, bag_of, sizes, max, rows, _, mode, sparse).

    The dense one has no ``offsets`` and no ``sparse``. A sparse gradient is not described.
    """
    shift = 1 if call.op.endswith("bag_backward.default") else 0
    if shift and _argument(call, 9, "sparse", False):
        return None
    grad, index, rows, mode = (call.args[i] for i in (0, 1, 5 + shift, 7 + shift))
    return _bag("backward", (rows, grad.shape[-1]), grad.shape[0], index.numel, mode, grad.dtype)


def _argument(call: OpCall, at: int, name: str, default: Any) -> Any:
    return call.args[at] if len(call.args) > at else call.kwargs.get(name, default)


def _bag(
    op: str, table: tuple[int, ...], bags: int, lookups: int, mode: int, dtype: str
) -> EmbeddingBag | None:
    if min(*table, bags, lookups) < 1:
        return None
    rows, dim = table
    return EmbeddingBag(
        op=op, rows=rows, dim=dim, bags=bags, lookups=lookups, mode=MODES[mode], dtype=dtype
    )


def gpu_points(rng: np.random.Generator) -> Iterator[EmbeddingBag]:
    """Yields points without end: tables of DLRMs; indices uniform, Zipf, or as in a trace.

    As in a trace: Zipf, and a share of the look-ups repeats rows looked up shortly before.
    """
    while True:
        bags, pooling = log_uniform(rng, *GPU_BAGS), log_uniform(rng, 1, GPU_POOLING)
        kind = str(rng.choice(["uniform", "zipf", "trace"]))
        yield EmbeddingBag(
            op=str(rng.choice(["forward", "backward"])),
            rows=log_uniform(rng, 1000, GPU_ROWS),
            dim=int(rng.choice([16, 32, 48, 64, 96, 128, 192, 256])),
            bags=bags,
            lookups=bags * pooling,
            skew=0.0 if kind == "uniform" else round(float(rng.uniform(0.6, 1.3)), 2),
            repeats=round(float(rng.uniform(0.2, 0.8)), 2) if kind == "trace" else 0.0,
            mode=str(rng.choice(MODES, p=[0.92, 0.06, 0.02])),
        )


def resize(p: EmbeddingBag, factor: float, lean: float) -> EmbeddingBag:
    """Bags, then look-ups a bag, then the width; rows of the table with a dense gradient of it."""
    pooling = max(1, round(p.lookups / p.bags))
    least, most = min(GPU_BAGS[0], p.bags), max(GPU_BAGS[1], p.bags)
    bags = min(most, max(least, round(p.bags * factor**lean)))
    left = factor * p.bags / bags
    wanted = min(max(GPU_POOLING, pooling), max(1, round(pooling * left)))
    left *= pooling / wanted
    dim = min(256, max(min(16, p.dim), aligned(p.dim * left, p.dim)))
    rows = p.rows
    if p.op == "backward":
        rows = min(GPU_ROWS, max(min(1000, p.rows), round(p.rows * factor)))
    return replace(p, bags=bags, lookups=bags * wanted, dim=dim, rows=rows)


def allocated_bytes(p: EmbeddingBag) -> float:
    """The whole table, of which the rows looked up are read."""
    return 1.0 * p.rows * p.dim * float(itemsize_bytes(p.dtype))


FAMILY = Family(
    name="embedding_bag",
    params=EmbeddingBag,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={
        "aten._embedding_bag.default": from_forward,
        "aten._embedding_bag_forward_only.default": from_forward,
        "aten._embedding_bag_backward.default": from_backward,
        "aten._embedding_bag_dense_backward.default": from_backward,
    },
    gpu_sweep=GpuSweep(
        points=gpu_points,
        dtypes=GPU_DTYPES,
        resize=resize,
        allocated_bytes=allocated_bytes,
        weight=2.0,
    ),
)
