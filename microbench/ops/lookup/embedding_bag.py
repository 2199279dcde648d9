"""Embedding bag: rows of a table, summed bag by bag, and the dense gradient of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from microbench.ops.lookup.reuse import (
    LEAST,
    MOST,
    draw_indices,
    histogram,
    histogram_text,
    hit_frac,
    parse_histogram,
    reuse_of,
    scatter_factor,
)
from microbench.ops.sizes import aligned

MODES = ("sum", "mean", "max")  # as numbered by aten
MAX_ELEMENTS = 2**24
KINDS = ("uniform", "zipf", "trace", "histogram")
MAX_SIGMA = 2.0  # of the logarithm of how often rows are looked up
DRAWN_ROWS = 4096
SHOWN_BINS = (0, 2, 5, 9, 13)  # of the histogram, as features
RECENT = 1024
GPU_DTYPES = {"fp32": 0.88, "bf16": 0.1, "fp16": 0.02}
GPU_BAGS = (512, 8192)
GPU_POOLING = 128  # look-ups of a bag at most
GPU_ROWS = 20_000_000  # of a table at most


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBag:
    """One call that sums ``lookups`` rows of a (rows, dim) table into ``bags``, or its backward.

    The index stream: ``unique`` distinct rows, looked up as often as the histogram ``reuse`` says
    (see ``microbench.ops.lookup.reuse``). Where ``reuse`` is empty, rows are drawn with the Zipf
    exponent ``skew``, 0 for uniform; a share ``repeats`` of them repeats one of the 1,024 before.
    ``spread``: standard deviation of the bags' lengths over their mean. ``weighted``: rows are
    multiplied by a weight per lookup.
    """

    op: str
    rows: int
    dim: int
    bags: int
    lookups: int
    skew: float = 0.0
    repeats: float = 0.0
    unique: int = 0
    reuse: str = ""
    spread: float = 0.0
    weighted: bool = False
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
            mode=str(rng.choice(MODES, p=[0.6, 0.3, 0.1])),
        )
        gathered = p.lookups * p.dim * (1 if p.op == "forward" else 4)  # one thread adds gradients
        if p.lookups <= 2**19 and max(p.rows * p.dim, gathered) <= MAX_ELEMENTS:
            yield with_random_stream(rng, p)


def with_random_stream(rng: np.random.Generator, p: EmbeddingBag) -> EmbeddingBag:
    """The point with an index stream of a random kind: uniform, Zipf, as a trace, by histogram.

    As a trace: Zipf, and a share of the lookups repeats rows looked up shortly before. By
    histogram: rows are looked up log-normally often.
    """
    kind = str(rng.choice(KINDS))
    spread = round(float(rng.uniform(0.2, 1.5)), 2) if rng.random() < 0.5 else 0.0
    weighted = p.mode == "sum" and bool(rng.random() < 0.2)
    p = replace(p, spread=spread if p.lookups > p.bags else 0.0, weighted=weighted)
    if kind == "histogram":
        return _with_random_histogram(rng, p)
    return replace(
        p,
        skew=0.0 if kind == "uniform" else round(float(rng.uniform(0.6, 1.3)), 2),
        repeats=round(float(rng.uniform(0.2, 0.8)), 2) if kind == "trace" else 0.0,
    )


def _with_random_histogram(rng: np.random.Generator, p: EmbeddingBag) -> EmbeddingBag:
    """Rows looked up exp(N(log m, s**2)) times, for random m and s."""
    middle = np.exp(rng.uniform(0, np.log(max(1.0, p.lookups / 4))))
    times = rng.lognormal(np.log(middle), rng.uniform(0, MAX_SIGMA), DRAWN_ROWS)
    times = np.clip(np.round(times), 1, p.lookups)
    unique = min(p.rows, max(1, round(p.lookups / float(times.mean()))))
    shares = parse_histogram(histogram_text(histogram(times)))
    unique = min(unique, int(p.lookups / float(shares @ LEAST)))  # all bins have room for lookups
    return replace(p, unique=unique, reuse=histogram_text(shares)) if unique else p


def draw_stream(p: EmbeddingBag, device: str) -> tuple[Any, Any]:
    """Random row numbers (lookups,) and the starts (bags,) of bags, int64 on the device.

    Row numbers follow the point's reuse histogram where it has one, else its skew and repeats.
    """
    import torch  # lazy: formulas must import where torch is absent

    rng = np.random.default_rng(int(torch.randint(2**31, ()).item()))
    starts = torch.tensor(_starts(rng, p), device=device)
    if not p.reuse:
        return zipf_indices(p, device), starts
    index = draw_indices(rng, p.rows, p.lookups, p.unique, parse_histogram(p.reuse))
    return torch.tensor(index, device=device), starts


def _starts(rng: np.random.Generator, p: EmbeddingBag) -> np.ndarray:
    """Starts of bags whose lengths have the mean lookups / bags and the relative ``spread``."""
    if not p.spread:
        return np.arange(p.bags) * p.lookups // p.bags
    variance = np.log1p(p.spread**2)
    ends = np.cumsum(rng.lognormal(-variance / 2, np.sqrt(variance), p.bags))
    whole = np.floor(ends / ends[-1] * p.lookups + 0.5).astype(np.int64)
    return np.concatenate([[0], whole[:-1]])


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
    return rank * scatter_factor(p.rows) % p.rows


def build(p: EmbeddingBag, device: str) -> Workload:
    """Tensors of the point's index stream; the backward gets what its forward returned."""
    import torch  # lazy: formulas must import where torch is absent

    aten, mode = torch.ops.aten, MODES.index(p.mode)
    index, starts = draw_stream(p, device)
    table = torch.randn(p.rows, p.dim, device=device).to(torch_dtype(p.dtype))
    weight = torch.rand(p.lookups, device=device).to(table.dtype) if p.weighted else None
    given = (table, index, starts, False, mode, False, weight)
    if p.op == "forward":
        return Workload(run=lambda: aten._embedding_bag(*given))
    _, bag_of, sizes, extremes = aten._embedding_bag(*given)
    grad = torch.randn(p.bags, p.dim, device=device).to(torch_dtype(p.dtype))
    rest = (index, starts, bag_of, sizes, extremes, p.rows, False, mode, False, weight)
    return Workload(run=lambda: aten._embedding_bag_backward(grad, *rest))


def flops(p: Any) -> Any:
    """An addition (or comparison) per element of every row looked up, both ways.

    Where lookups have weights, a multiplication besides.
    """
    return (1.0 + np.asarray(p.weighted)) * p.lookups * p.dim


def bytes_moved(p: Any) -> Any:
    """Forward: a row read per lookup, a row written per bag. Index and offset are int64.

    Backward: bags read, the whole gradient zeroed, a row read and written per lookup.
    """
    backward = np.equal(p.op, "backward")
    rows = p.bags + np.where(backward, 2.0 * p.lookups + p.rows, 1.0 * p.lookups)
    itemsize = itemsize_bytes(p.dtype)
    weights = np.asarray(p.weighted) * 1.0 * p.lookups * itemsize
    return rows * p.dim * itemsize + 8.0 * (p.lookups + p.bags) + weights


def unique_rows(p: Any) -> Any:
    """Distinct rows that a call looks up: as stated, else as expected of its skew and repeats."""
    return reuse_of(p)[0]


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
    """Sizes, pooling, how often rows are reused, and the lookups that hit the last cache.

    ``rows_to_4`` is the share of touched rows that are looked up at most 4 times.
    """
    row_bytes = 1.0 * p.dim * itemsize_bytes(p.dtype)
    line_bytes = 64 * np.ceil(row_bytes / 64)
    unique, shares = reuse_of(p)
    cumulated = np.cumsum(shares, axis=-1)
    return {
        "op": p.op,
        "mode": p.mode,
        "dtype": p.dtype,
        "weighted": np.asarray(p.weighted, dtype=float),
        "spread": p.spread,
        "log_rows": np.log2(p.rows),
        "log_dim": np.log2(p.dim),
        "log_bags": np.log2(p.bags),
        "log_lookups": np.log2(p.lookups),
        "log_pooling": np.log2(p.lookups / p.bags),
        "unique_frac": unique / p.rows,
        "log_reuse": np.log2(p.lookups / unique),
        **{f"rows_to_{int(MOST[i])}": cumulated[..., i] for i in SHOWN_BINS},
        "hit_frac": hit_frac(p.lookups, unique, shares, gpu.l2_bytes / line_bytes),
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
    weighted = _argument(call, 6, "per_sample_weights", None) is not None
    return _bag(call, table.shape, bags, index.numel, mode, weighted)


def from_backward(call: OpCall) -> EmbeddingBag | None:
    """_embedding_bag_backward(grad, index, offsets, bag_of, sizes, max, rows, _, mode, sparse, w).

    The dense one has no ``offsets`` and no ``sparse``. A sparse gradient is not described.
    """
    dense = call.op.endswith("dense_backward.default")
    if not dense and _argument(call, 9, "sparse", False):
        return None
    shift = 0 if dense else 1
    grad, index, rows, mode = (call.args[i] for i in (0, 1, 5 + shift, 7 + shift))
    weighted = _argument(call, 8 if dense else 10, "per_sample_weights", None) is not None
    return _bag(call, (rows, grad.shape[-1]), grad.shape[0], index.numel, mode, weighted)


def _argument(call: OpCall, at: int, name: str, default: Any) -> Any:
    return call.args[at] if len(call.args) > at else call.kwargs.get(name, default)


def _bag(
    call: OpCall, table: tuple[int, ...], bags: int, lookups: int, mode: int, weighted: bool
) -> EmbeddingBag | None:
    """A call's point; what is known of its index stream stands in ``call.kwargs["stream"]``."""
    if min(*table, bags, lookups) < 1:
        return None
    return EmbeddingBag(
        op="backward" if "backward" in call.op else "forward",
        rows=table[0],
        dim=table[1],
        bags=bags,
        mode=MODES[mode],
        dtype=call.args[0].dtype,
        weighted=weighted,
        **{"lookups": lookups, **call.kwargs.get("stream", {})},
    )


def gpu_points(rng: np.random.Generator) -> Iterator[EmbeddingBag]:
    """Yields points without end: tables of DLRMs with index streams of all kinds."""
    while True:
        bags, pooling = log_uniform(rng, *GPU_BAGS), log_uniform(rng, 1, GPU_POOLING)
        p = EmbeddingBag(
            op=str(rng.choice(["forward", "backward"])),
            rows=log_uniform(rng, 1000, GPU_ROWS),
            dim=int(rng.choice([16, 32, 48, 64, 96, 128, 192, 256])),
            bags=bags,
            lookups=bags * pooling,
            mode=str(rng.choice(MODES, p=[0.92, 0.06, 0.02])),
        )
        yield with_random_stream(rng, p)


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
    lookups = bags * wanted
    unique = min(rows, lookups, max(1, round(p.unique * lookups / p.lookups))) if p.unique else 0
    return replace(p, bags=bags, lookups=lookups, dim=dim, rows=rows, unique=unique)


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
