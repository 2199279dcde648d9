"""What to sweep on a GPU: sizes of real training, grids around tile edges, every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.ops import families
from microbench.ops.attention import Attention
from microbench.ops.embedding_bag import MODES, EmbeddingBag
from microbench.ops.family import Family, itemsize_bytes, log_uniform
from microbench.ops.fused import Fused
from microbench.ops.gemm import Gemm
from microbench.ops.host import Host, launches

MAX_ROOFLINE_US = 10_000.0  # a dozen repetitions of a point must not take a second
MAX_BYTES_FRAC = 0.06  # of the GPU's memory: operands, results and gradients stay beside others
TILE_EDGES: tuple[int, ...] = (
    64,
    128,
    192,
    256,
    384,
    512,
    640,
    768,
    1024,
    1280,
    1536,
    1600,
    2048,
    2560,
    3072,
)
TILE_EDGES += (4096, 5120, 6144, 8192, 10240, 12288, 16384)
PRODUCT_DTYPES = ("bf16", "bf16", "bf16", "fp32", "tf32", "fp16")
DTYPES = {
    "gemm": (*PRODUCT_DTYPES, "fp8"),
    "conv": PRODUCT_DTYPES,
    "attention": ("bf16", "bf16", "fp16", "fp32", "tf32"),
    "host": ("fp32",),
}
OTHER_DTYPES = ("fp32", "bf16", "bf16", "fp16")
LARGEST_FACTOR = 64  # between what the families sweep for a CPU's sake and a GPU's sizes


def grid(name: str, seed: int) -> Iterator[Any]:
    """Endless but for host: points of a family in sizes of a GPU, in fp32."""
    rng = _rng(name, seed)
    if name in OWN:
        return OWN[name](rng)
    return (enlarged(name, p, rng) for p in families()[name].sweep())


def on_gpu(name: str, points: Iterator[Any], gpu: Gpu, seed: int) -> Iterator[Any]:
    """The points in dtypes GPUs train in, as far as the GPU can hold and time them quickly."""
    rng = _rng(name, seed + 1)
    typed = (retyped(name, p, rng) for p in points)
    return (p for p in typed if fits(families()[name], p, gpu))


def _rng(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, *name.encode()])


def fits(family: Family, p: Any, gpu: Gpu) -> bool:
    """Whether a point is neither too long nor too large to be one of many."""
    moved = float(family.bytes_moved(p))
    dtype = getattr(p, "dtype", "fp32")
    us = max(float(family.flops(p)) / gpu.peak(dtype), moved / gpu.hbm_bytes_per_s) * 1e6
    return us <= MAX_ROOFLINE_US and moved <= MAX_BYTES_FRAC * gpu.hbm_bytes


def retyped(name: str, p: Any, rng: np.random.Generator) -> Any:
    """A fp32 point in a dtype that GPUs train in; fp8 only where its products are defined."""
    if getattr(p, "dtype", "") != "fp32":
        return p
    dtype = str(rng.choice(DTYPES.get(name, OTHER_DTYPES)))
    if dtype == "fp8":
        m, n, k = (16 * max(1, round(s / 16)) for s in (p.m, p.n, p.k))
        return Gemm(op="mm", m=m, n=n, k=k, layout="nt", dtype="fp8")
    if name == "fused":
        p = _scaled_bytes(p, itemsize_bytes(dtype) / itemsize_bytes("fp32"))
    return replace(p, dtype=dtype)


def _scaled_bytes(p: Fused, factor: float) -> Fused:
    read, written = round(p.read_bytes * factor), round(p.written_bytes * factor)
    return replace(p, read_bytes=read, written_bytes=written)


def size(rng: np.random.Generator, low: int, high: int) -> int:
    """Half the time within 8 of a tile edge, else any; mostly multiples of 8."""
    if rng.random() < 0.5:
        edges = [e for e in TILE_EDGES if low <= e <= high]
        return int(rng.choice(edges)) + int(rng.choice([-8, -1, 0, 0, 0, 1, 8]))
    n = log_uniform(rng, low, high)
    return max(8, 8 * round(n / 8)) if rng.random() < 0.8 else n


def gemms(rng: np.random.Generator) -> Iterator[Gemm]:
    """Products of up to 16384 on a side, skinny ones, batches of attention's and of experts'."""
    while True:
        op = str(rng.choice(["mm", "addmm", "bmm", "grouped_mm"], p=[0.45, 0.25, 0.2, 0.1]))
        m, n, k = (size(rng, 16, 16384) for _ in range(3))
        batch = 1
        if op == "grouped_mm":
            batch = int(rng.choice([2, 4, 8, 16, 32, 64, 128]))
            m, n, k = (8 * round(size(rng, 64, 8192) / 8) for _ in range(3))
        if op == "bmm":
            batch = log_uniform(rng, 2, 1024)
            m, n, k = (size(rng, 16, 2048) for _ in range(3))
        if rng.random() < 0.15 and op != "grouped_mm":  # whose rows must be aligned
            m = log_uniform(rng, 1, 64)  # decoding
        yield Gemm(op=op, m=m, n=n, k=k, batch=batch, layout=str(rng.choice(["nn", "nt", "tn"])))


def attentions(rng: np.random.Generator) -> Iterator[Attention]:
    """Training, mostly causal; grouped queries, masks, dropout, cross-attention, decoding."""
    while True:
        heads = int(rng.choice([4, 6, 8, 12, 16, 20, 25, 32, 40, 64]))
        groups = int(rng.choice([1, 1, 1, 4, 8]))
        q_len = kv_len = size(rng, 64, 16384)
        op = str(rng.choice(["forward", "backward"]))
        lengths = str(rng.choice(["self", "cross", "decode"], p=[0.85, 0.08, 0.07]))
        if lengths == "cross":
            kv_len = size(rng, 64, 4096)
        if lengths == "decode":
            op, q_len = "forward", 1
        kind = str(rng.choice(["full", "causal", "masked"], p=[0.35, 0.55, 0.1]))
        yield Attention(
            op=op,
            batch=log_uniform(rng, 1, 128),
            heads=heads,
            kv_heads=heads // groups if heads % groups == 0 else heads,
            q_len=q_len,
            kv_len=kv_len,
            head_dim=int(rng.choice([32, 64, 64, 80, 96, 128, 128, 256])),
            causal=kind == "causal" and lengths == "self",
            masked=kind == "masked",
            dropout=bool(rng.random() < 0.15),
        )


def embedding_bags(rng: np.random.Generator) -> Iterator[EmbeddingBag]:
    """Tables of recommendation models; indices uniform, Zipf, or as in a trace.

    As in a trace: Zipf, and a share of the lookups repeats rows looked up shortly before.
    """
    while True:
        bags = log_uniform(rng, 128, 8192)
        pooling = 1 if rng.random() < 0.2 else log_uniform(rng, 2, 128)
        kind = str(rng.choice(["uniform", "zipf", "trace"]))
        yield EmbeddingBag(
            op=str(rng.choice(["forward", "backward"])),
            rows=log_uniform(rng, 1000, 20_000_000),
            dim=int(rng.choice([16, 32, 48, 64, 96, 128, 192, 256])),
            bags=bags,
            lookups=bags * pooling,
            skew=0.0 if kind == "uniform" else round(float(rng.uniform(0.6, 1.3)), 2),
            repeats=round(float(rng.uniform(0.2, 0.8)), 2) if kind == "trace" else 0.0,
            mode=str(rng.choice(MODES, p=[0.8, 0.15, 0.05])),
        )


def enlarged(name: str, p: Any, rng: np.random.Generator) -> Any:
    """A point of the family's own sweep made up to ``LARGEST_FACTOR`` times as large."""
    factor = log_uniform(rng, 1, LARGEST_FACTOR)
    known = {f.name for f in fields(p)}
    if name == "elementwise":
        whole = p.form in ("same", "scalar")
        numel = p.numel * factor
        return replace(p, numel=numel, inner=numel if whole else p.inner)
    if name == "fused":
        return replace(_scaled_bytes(p, factor), numel=p.numel * factor)
    if name == "random" and p.op == "multinomial":
        return replace(p, rows=p.rows * factor)
    if name == "reduction" and p.outer == 1 and not p.op.startswith("nll"):
        return replace(p, size=p.size * factor)
    if name == "index" and "put" in p.op:  # one leading axis only
        return replace(p, inner=p.inner * factor)
    if name == "embedding":
        rows = p.rows * log_uniform(rng, 1, 4)
        return replace(p, rows=rows, lookups=p.lookups * factor)
    for grown in ("batch", "rows", "outer", "numel", "size"):
        if grown in known:
            return replace(p, **{grown: getattr(p, grown) * factor})
    return p


def hosts(rng: np.random.Generator) -> Iterator[Host]:
    """Launches, and the events and optimizer steps that a CPU's host has, too."""
    yield from launches()
    yield from families()["host"].sweep()


OWN: dict[str, Callable[[np.random.Generator], Iterator[Any]]] = {
    "gemm": gemms,
    "attention": attentions,
    "embedding_bag": embedding_bags,
    "host": hosts,
}
