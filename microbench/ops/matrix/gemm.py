"""Dense matrix multiply: C[m,n] = A[m,k] @ B[k,n], optionally batched or with a bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall, TensorSpec
from microbench.ops.family import (
    Family,
    Workload,
    is_any,
    itemsize_bytes,
    log_uniform,
    repeated,
    torch_dtype,
)

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 64))
LARGE = 8192
TENSOR_CORES = ("tf32", "fp16", "bf16")
OLD_FLOPS = 512  # of an SM of Volta or Turing in a clock, in TF32's width
BATCHED = ("bmm", "grouped_mm")
GROUPED = "aten._grouped_mm.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One call, in BLAS names; ``layout`` says which operands are transposed views (n or t).

    scaled_mm: fp8 matrices, each scaled as a whole, to bf16, without their casts. grouped_mm is a
    product by expert, ``batch`` of them, tokens in a row: of m tokens each, or over k tokens each
    in layout tn.
    """

    op: str = "mm"
    m: int
    n: int
    k: int
    batch: int = 1
    layout: str = "nn"
    dtype: str = "fp32"


def sweep() -> Iterator[Gemm]:
    """Endless: skinny, square and batched products, sizes from 1 to 8192, every layout."""
    rng = np.random.default_rng(1)
    layouts = ["nn", "nt", "tn"]
    while True:
        op = str(rng.choice(["mm", "addmm", "bmm", "grouped_mm"], p=[0.32, 0.32, 0.32, 0.04]))
        m, n, k = (log_uniform(rng, 4, 4096) for _ in range(3))
        batch = log_uniform(rng, 2, 256) if op in BATCHED else 1
        if op in BATCHED:
            m, n, k = (log_uniform(rng, 4, 512) for _ in range(3))
        if op == "grouped_mm" or rng.random() < 0.5:  # real widths are multiples of 8 more often
            m, n, k = (max(8, 8 * round(s / 8)) for s in (m, n, k))
        if batch * m * n * k > 4e9:
            continue
        yield Gemm(op=op, m=m, n=n, k=k, batch=batch, layout=str(rng.choice(layouts)))


def build(p: Gemm, device: str) -> Workload:
    """Operands of random numbers, transposed views where the layout says so.

    Outside bf16 torch runs grouped_mm one expert after the other, and waits for the GPU to learn
    how many tokens each has (_grouped_mm_fallback in ATen/native/GroupedMMUtils.h): not one op.
    """
    import torch  # lazy: formulas must import where torch is absent

    if p.op == "grouped_mm":
        if device == "cuda" and p.dtype != "bf16":
            raise NotImplementedError("grouped_mm is timed in bf16 alone: others wait for the host")
        return _grouped(p, device)

    def operand(rows: int, cols: int, transposed: bool) -> Any:
        shape = (p.batch, cols, rows) if transposed else (p.batch, rows, cols)
        tensor = repeated(torch.randn, shape, device).to(torch_dtype(p.dtype))
        return tensor.transpose(1, 2) if transposed else tensor

    a = operand(p.m, p.k, p.layout[0] == "t")
    b = operand(p.k, p.n, p.layout[1] == "t")
    bias = torch.randn(p.n, device=device).to(torch_dtype(p.dtype))
    if p.op == "bmm":
        return Workload(run=lambda: torch.bmm(a, b), through_aten=False)
    a, b = a[0], b[0]
    if p.op == "scaled_mm":
        one = torch.ones((), device=device)
        return Workload(
            run=lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16),
            through_aten=False,
        )
    if p.op == "addmm":
        return Workload(run=lambda: torch.addmm(bias, a, b), through_aten=False)
    return Workload(run=lambda: torch.mm(a, b), through_aten=False)


def _grouped(p: Gemm, device: str) -> Workload:
    """Experts of equal shares, tokens sorted by expert as Hugging Face's models have them."""
    import torch  # lazy, as above

    def operand(*shape: int) -> Any:
        return repeated(torch.randn, shape, device).to(torch_dtype(p.dtype))

    tokens = p.k if p.layout == "tn" else p.m
    ends = torch.arange(1, p.batch + 1, dtype=torch.int32, device=device) * tokens
    if p.layout == "tn":
        a, b = operand(p.batch * tokens, p.m).t(), operand(p.batch * tokens, p.n)
    elif p.layout == "nt":
        a, b = operand(p.batch * tokens, p.k), operand(p.batch, p.n, p.k).transpose(1, 2)
    else:
        a, b = operand(p.batch * tokens, p.k), operand(p.batch, p.k, p.n)
    return Workload(run=lambda: torch._grouped_mm(a, b, ends), through_aten=False)


def flops(p: Any) -> Any:
    """2*batch*m*n*k: a multiply and an add per term."""
    return 2.0 * p.batch * p.m * p.n * p.k


def bytes_moved(p: Any) -> Any:
    """Lower bound: A and B read once, C written once; real traffic is higher."""
    return 1.0 * p.batch * (p.m * p.k + p.k * p.n + p.m * p.n) * itemsize_bytes(p.dtype)


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
    """Sizes and aspect ratios; waves of tiles and how full they are, for tiles libraries use."""
    item = 1.0 * np.asarray(itemsize_bytes(p.dtype)) * p.batch / gpu.l2_bytes
    found = {
        "op": p.op,
        "layout": p.layout,
        "dtype": p.dtype,
        "log_m": np.log2(p.m),
        "log_n": np.log2(p.n),
        "log_k": np.log2(p.k),
        "log_batch": np.log2(p.batch),
        "log_m_over_n": np.log2(1.0 * p.m / p.n),
        "log_k_over_mn": np.log2(p.k / np.sqrt(1.0 * p.m * p.n)),
        "log_a_fill": np.log2(item * p.m * p.k),
        "log_b_fill": np.log2(item * p.n * p.k),
        "log_c_fill": np.log2(item * p.m * p.n),
        "m_mod_16": p.m % 16,
        "n_mod_16": p.n % 16,
        "k_mod_16": p.k % 16,
        "m_mod_128": p.m % 128,
        "n_mod_128": p.n % 128,
        "m_odd": p.m % 2,
    }
    for rows, cols in TILES:
        tiles = p.batch * np.ceil(p.m / rows) * np.ceil(p.n / cols)
        waves, name = tiles / gpu.sm_count, f"{rows}x{cols}"
        found[f"log_waves_{name}"] = np.log2(waves)
        found[f"wave_fill_{name}"] = waves / np.ceil(waves)
        found[f"tile_fill_{name}"] = 1.0 * p.m * p.n * p.batch / (tiles * rows * cols)
    return found


def rate(p: Any, gpu: Gpu) -> Any:
    """FLOP/s at most where a row of an operand or of the result is an odd number of elements long.

    Then NVIDIA's libraries take kernels of the generation before Ampere: what one of its SMs does
    in a clock, a quarter of the peak at least. Found on published steps of Transformer-XL, whose
    vocabulary is odd: half the speed on an A100, a quarter on an H100, as fast as others on V100,
    Turing, RTX 3090 and A6000.
    """
    transposed = [is_any(p.layout, those) for those in (("tn", "tt"), ("nt", "tt"))]
    rows = (np.where(transposed[0], p.m, p.k), np.where(transposed[1], p.k, p.n), p.n)
    odd = np.any([np.asarray(row) % 2 for row in rows], axis=0) & is_any(p.dtype, TENSOR_CORES)
    half = ~np.asarray(is_any(p.dtype, ("tf32",)))
    old = (1 + half) * OLD_FLOPS * gpu.sm_count * gpu.clock_hz
    old = np.maximum(old, np.where(half, gpu.peak("fp16"), gpu.peak("tf32")) / 4)
    return np.where(odd & (gpu.vendor == "nvidia") & (gpu.kind == "gpu"), old, np.inf)


def _layout(a: TensorSpec, b: TensorSpec) -> str:
    return "".join("n" if t.stride == () or t.stride[-1] == 1 else "t" for t in (a, b))


def from_mm(call: OpCall) -> Gemm | None:
    """mm(A, B), addmm(bias, A, B), bmm(A, B), baddbmm(C, A, B) as logged.

    fp8 kernels know one layout: what does not lie so was transposed when it was cast.
    """
    op = call.op.split(".")[1]
    a, b = (call.args[1], call.args[2]) if op in ("addmm", "baddbmm") else call.args[:2]
    batch = a.shape[0] if op in ("bmm", "baddbmm") else 1
    m, k = a.shape[-2:]
    kind, layout = {"baddbmm": "bmm"}.get(op, op), _layout(a, b)
    if a.dtype == "fp8":
        kind, layout = "scaled_mm", "nt"
    return Gemm(op=kind, m=m, n=b.shape[-1], k=k, batch=batch, layout=layout, dtype=a.dtype)


def from_grouped(call: OpCall) -> Gemm | None:
    """_grouped_mm(A, B, ends): every expert takes its share of the tokens, rounded up.

    (tokens, k) x (experts, k, n), or for weights' gradients (m, tokens) x (tokens, n).
    """
    a, b, experts = call.args[0], call.args[1], call.args[2].shape[0]
    m, k = a.shape
    over = len(b.shape) == 2
    m, k = (m, -(-k // experts)) if over else (-(-m // experts), k)
    layout = "tn" if over else "n" + _layout(a, b)[1]
    kind, layout = ("scaled_mm", "nt") if a.dtype == "fp8" else ("grouped_mm", layout)
    return Gemm(op=kind, m=m, n=b.shape[-1], k=k, batch=experts, layout=layout, dtype=a.dtype)


FAMILY = Family(
    name="gemm",
    params=Gemm,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    rate=rate,
    alike={"mm": {}, "addmm": {"layout": "nt"}, "bmm": {}, "grouped_mm": {}},  # weights transposed
    tiled=True,
    large=lambda dtype: Gemm(m=LARGE, n=LARGE, k=LARGE, dtype=dtype),
    answers={
        **{f"aten.{op}.default": from_mm for op in ("mm", "addmm", "bmm", "baddbmm")},
        GROUPED: from_grouped,
    },
    weight=2.0,
    gpu_weight=4.0,
)
