"""What to sweep on a GPU: sizes and dtypes of real training, as much work as is worth timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.ops import families
from microbench.ops.family import Family, itemsize_bytes, log_uniform
from microbench.ops.lookup.embedding_bag import MODES, EmbeddingBag
from microbench.ops.matrix.attention import Attention
from microbench.ops.matrix.conv import Conv, layers
from microbench.ops.matrix.gemm import Gemm
from microbench.ops.memory.elementwise_names import ALLOCATIONS
from microbench.ops.memory.random import DROPOUT
from microbench.ops.step.host import Host, on_one_gpu, wrapped
from microbench.ops.step.optimizer import FUSED, OptimizerOp
from microbench.sweep.gpu_sizes import BAGS, MAX_POOLING, MAX_ROWS_OF_TABLE, grown

SMALL_US = 3.0  # roofline below which starting a kernel takes longer than its work
SMALL_SHARE = 0.15  # of a family's points at most
SMALL_DRAWN = 0.1  # how often a small one is drawn; others are small as no axis makes them larger
MAX_ROOFLINE_US = 10_000.0
MAX_TIME_US = 20_000.0  # of one run: a point and its repetitions must not take a second
MAX_BYTES_FRAC = 0.04  # of the GPU's memory: a chunk of points is held at once
# Share of the roofline that slow kernels of a family reach: assumed, it bounds sizes alone.
SLOW_FRAC: Mapping[str, float] = {
    "gemm": 0.5,
    "attention": 0.2,
    "conv": 0.1,
    "norm": 0.2,
    "elementwise": 0.2,
    "optimizer": 0.2,
    "reduction": 0.1,
    "recurrent": 0.02,
}
SLOW_FRAC_OTHERS = 0.05  # sorts, atomic additions
SIZE_ROUNDS = 6
SIZE_TOLERANCE = 1.1
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
# As ``gpu_iterations`` trains, and a little fp16 and fp8 to compare with published rows.
PRODUCTS = {"bf16": 0.47, "fp32": 0.25, "tf32": 0.25, "fp16": 0.03}
DTYPES: Mapping[str, Mapping[str, float]] = {
    "gemm": {"bf16": 0.45, "fp32": 0.23, "tf32": 0.23, "fp16": 0.03, "fp8": 0.06},
    "conv": PRODUCTS,
    "attention": PRODUCTS,
    "embedding_bag": {"fp32": 0.88, "bf16": 0.1, "fp16": 0.02},
    "host": {"fp32": 1.0},
}
OTHER_DTYPES = {"fp32": 0.48, "bf16": 0.49, "fp16": 0.03}
GROUPED_ON = ("hopper", "blackwell")  # others run an expert at a time, as all do outside bf16
ADAMW: tuple[str, ...] = ("_foreach_mul_", "_foreach_mul_", "_foreach_lerp_", "_foreach_addcmul_")
ADAMW += ("_foreach_sqrt", "_foreach_div_", "_foreach_add_", "_foreach_addcdiv_")  # optim/adam.py
SGD = "_foreach_add_list"
COUNTERS = ("_foreach_add_", "_foreach_div_")  # also over steps, one element a tensor


def grid(name: str, seed: int) -> Iterator[Any]:
    """Endless but for host: points of a family, mostly in fp32 and in sizes yet to be chosen."""
    return OWN[name](_rng(name, seed)) if name in OWN else families()[name].sweep()


def on_gpu(
    name: str, points: Iterator[Any], gpu: Gpu, seed: int, captured: bool = False
) -> Iterator[Any]:
    """The points in dtypes GPUs train in, their rooflines log-uniform from 3 us up to the limit.

    Sizes of ``captured`` points stay as models have them, unless they are too small or too large.
    """
    rng, family = _rng(name, seed + 1), families()[name]
    seen = small = 0
    for p in points:
        typed = retyped(name, p, gpu, rng)
        if typed is None:
            continue
        sized = resized(family, typed, gpu, rng, captured)
        if not fits(family, sized, gpu):
            continue
        is_small = 0 < roofline_us(family, sized, gpu) < limits_us(name, gpu)[0]
        if is_small and small + 1 > SMALL_SHARE * (seen + 1):
            continue
        seen, small = seen + 1, small + is_small
        yield sized


def _rng(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, *name.encode()])


def roofline_us(family: Family, p: Any, gpu: Gpu) -> float:
    """The larger of flops at peak and bytes at memory's bandwidth."""
    flops_s = float(family.flops(p)) / gpu.peak(getattr(p, "dtype", "fp32"))
    return 1e6 * max(flops_s, float(family.bytes_moved(p)) / gpu.hbm_bytes_per_s)


def limits_us(name: str, gpu: Gpu) -> tuple[float, float]:
    """Rooflines worth timing: from what is no longer small to what slow kernels take 20 ms for."""
    slow_us = MAX_TIME_US * SLOW_FRAC.get(name, SLOW_FRAC_OTHERS)
    bytes_us = 1e6 * MAX_BYTES_FRAC * gpu.hbm_bytes / gpu.hbm_bytes_per_s
    bound_by_flops = name in ("gemm", "conv", "attention", "recurrent")
    high = min(MAX_ROOFLINE_US, slow_us if bound_by_flops else min(slow_us, bytes_us))
    return min(SMALL_US, high / 10), high


def fits(family: Family, p: Any, gpu: Gpu) -> bool:
    """Whether a point is neither too long nor too large to be one of many."""
    held = max(float(family.bytes_moved(p)), held_bytes(family.name, p))
    short = roofline_us(family, p, gpu) <= SIZE_TOLERANCE * limits_us(family.name, gpu)[1]
    return short and held <= MAX_BYTES_FRAC * gpu.hbm_bytes


def held_bytes(name: str, p: Any) -> float:
    """Bytes of operands that are not all read: tables, classes of a loss, scores of attention.

    torch's attention writes the scores to memory where no fused kernel takes the call: with fewer
    keys than queries' heads outside fp16 and bf16, or with a mask; three such tensors live at once.
    """
    elements = 0.0
    if name in ("embedding", "embedding_bag"):
        elements = 1.0 * p.rows * p.dim
    if name == "index":
        elements = 1.0 * p.outer * max(p.size, p.source) * p.inner
    if name == "reduction":
        elements = 1.0 * p.outer * p.size * p.inner
    if name == "attention" and p.kv_heads != p.heads:
        unfused = p.masked or p.dtype not in ("fp16", "bf16")
        elements = 3.0 * unfused * p.batch * p.heads * p.q_len * p.kv_len
    return elements * float(itemsize_bytes(p.dtype)) if elements else 0.0


def retyped(name: str, p: Any, gpu: Gpu, rng: np.random.Generator) -> Any | None:
    """A fp32 point in a dtype that GPUs train in, as a GPU calls it; None for what none calls."""
    if name == "elementwise" and p.op in ALLOCATIONS:  # no kernel
        return None
    if name == "random" and p.op == "bernoulli_":  # how a CPU draws a dropout
        p = replace(p, op=str(rng.choice(DROPOUT)))
    if name == "optimizer":
        p = replace(p, zero_frac=0.0)  # roots of zeros are no faster
    if getattr(p, "dtype", "") != "fp32":
        return p
    shares = DTYPES.get(name, OTHER_DTYPES)
    known = [d for d in shares if d in gpu.peak_flops_per_s] or ["fp32"]
    weights = np.array([shares.get(d, 1.0) for d in known])
    dtype = str(rng.choice(known, p=weights / weights.sum()))
    if dtype == "fp8":
        m, n, k = (16 * max(1, round(s / 16)) for s in (p.m, p.n, p.k))
        return Gemm(op="scaled_mm", m=m, n=n, k=k, layout="nt", dtype="fp8")
    if name == "gemm" and p.op == "grouped_mm":
        return replace(p, dtype="bf16") if gpu.architecture in GROUPED_ON else None
    if name == "fused":
        p = _of_itemsize(p, itemsize_bytes(dtype) / itemsize_bytes("fp32"))
    return replace(p, dtype=dtype)


def _of_itemsize(p: Any, factor: float) -> Any:
    read, written = round(p.read_bytes * factor), round(p.written_bytes * factor)
    return replace(p, read_bytes=read, written_bytes=written)


def resized(family: Family, p: Any, gpu: Gpu, rng: np.random.Generator, captured: bool) -> Any:
    """The point with a roofline drawn log-uniformly, one in ten below 3 us, as far as it grows."""
    low, high = limits_us(family.name, gpu)
    us, lean = roofline_us(family, p, gpu), float(rng.random())
    wanted_us = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    if rng.random() < SMALL_DRAWN:
        wanted_us = low * 10 ** -float(rng.random())
        captured = captured or us < low  # small already
        low = 0.0
    if us == 0 or (captured and low <= us <= high):
        return p
    for _ in range(SIZE_ROUNDS):
        if 1 / SIZE_TOLERANCE < wanted_us / us < SIZE_TOLERANCE:
            break
        p = grown(family.name, p, wanted_us / us, lean)
        us = roofline_us(family, p, gpu)
    return p


def size(rng: np.random.Generator, low: int, high: int) -> int:
    """Half the time at a tile edge or near it, else any; mostly multiples of 8."""
    if rng.random() < 0.5:
        edges = [e for e in TILE_EDGES if low <= e <= high]
        return int(rng.choice(edges)) + int(rng.choice([-8, -1, 0, 0, 0, 1, 8]))
    n = log_uniform(rng, low, high)
    return max(8, 8 * round(n / 8)) if rng.random() < 0.8 else n


def gemms(rng: np.random.Generator) -> Iterator[Gemm]:
    """Products of up to 16384 on a side, skinny ones, batches of attention's and of experts'."""
    while True:
        op = str(rng.choice(["mm", "addmm", "bmm", "grouped_mm"], p=[0.47, 0.28, 0.2, 0.05]))
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


def convs(rng: np.random.Generator) -> Iterator[Conv]:
    """Layers of all kinds in the sizes of large models."""
    return layers(rng)


def embedding_bags(rng: np.random.Generator) -> Iterator[EmbeddingBag]:
    """Tables of DLRMs; indices uniform, Zipf, or as in a trace.

    As in a trace: Zipf, and a share of the lookups repeats rows looked up shortly before.
    """
    while True:
        bags, pooling = log_uniform(rng, *BAGS), log_uniform(rng, 1, MAX_POOLING)
        kind = str(rng.choice(["uniform", "zipf", "trace"]))
        yield EmbeddingBag(
            op=str(rng.choice(["forward", "backward"])),
            rows=log_uniform(rng, 1000, MAX_ROWS_OF_TABLE),
            dim=int(rng.choice([16, 32, 48, 64, 96, 128, 192, 256])),
            bags=bags,
            lookups=bags * pooling,
            skew=0.0 if kind == "uniform" else round(float(rng.uniform(0.6, 1.3)), 2),
            repeats=round(float(rng.uniform(0.2, 0.8)), 2) if kind == "trace" else 0.0,
            mode=str(rng.choice(MODES, p=[0.92, 0.06, 0.02])),
        )


def updates(rng: np.random.Generator) -> Iterator[OptimizerOp]:
    """Calls of foreach AdamW and SGD over parameters of a whole model or one piece; fused steps.

    A ResNet has 160 tensors, BERT and GPT-2 150 to 580, a DLRM 50 to 80.
    """
    while True:
        ops = [(0.7, str(rng.choice(ADAMW))), (0.15, SGD), (0.15, str(rng.choice(FUSED)))]
        op = ops[int(rng.choice(len(ops), p=[share for share, _ in ops]))][1]
        tensors = log_uniform(rng, 40, 640) if rng.random() < 0.8 else log_uniform(rng, 1, 40)
        each = 1 if op in COUNTERS and rng.random() < 0.1 else log_uniform(rng, 10_000, 4_000_000)
        yield OptimizerOp(op=op, tensors=tensors, numel=tensors * each)


def hosts(rng: np.random.Generator) -> Iterator[Host]:
    """Launches and events, then optimizer steps; parallel wrappers where several GPUs are."""
    import torch  # lazy: sizes are drawn where torch is absent

    yield from on_one_gpu(rng)
    if torch.cuda.device_count() > 1:
        for trial in range(8):
            yield from wrapped(trial)


OWN: dict[str, Callable[[np.random.Generator], Iterator[Any]]] = {
    "gemm": gemms,
    "attention": attentions,
    "conv": convs,
    "embedding_bag": embedding_bags,
    "optimizer": updates,
    "host": hosts,
}
