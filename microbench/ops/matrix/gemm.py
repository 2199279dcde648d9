"""Dense matrix multiply: C[m,n] = A[m,k] @ B[k,n], optionally batched or with a bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import (
    BLOCK_SCALED,
    BY_INTEGERS,
    NARROW,
    OpCall,
    TensorSpec,
    torch_dtype,
)
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Measured,
    Numbers,
    Part,
    Point,
    Tensor,
    Workload,
    is_any,
    itemsize_bytes,
    logs,
    repeated,
)
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.sizes import MAX_SIDE, aligned, points_of, swept

SWEPT = facts_of(__file__)
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 64))
TENSOR_CORES = ("tf32", "fp16", "bf16")
OLD_FLOPS_PER_CLOCK = assumed(__file__, "old_flops_per_clock")  # of an SM
OLD_PEAK_FRAC = assumed(__file__, "old_peak_frac")
MAX_FLOPS = 8e9
GROUPED = "aten._grouped_mm.default"
MATRICES = {"mm": "mm", "addmm": "addmm", "_addmm_activation": "addmm", "bmm": "bmm"}
MATRICES |= {"baddbmm": "bmm", "addbmm": "bmm", "_scaled_mm": "scaled_mm"}  # the same kernels
WITH_SUM = ("addmm", "_addmm_activation", "baddbmm", "addbmm", "addmv")  # of what is given first
# Elsewhere torch runs one expert after the other. Source: torch 2.11, cuda/GroupedBlas.cpp.
GROUPED_ON = ("hopper", "blackwell", "blackwell-ultra")
FP8_CAST_COLUMNS = assumed(__file__, "fp8_cast_columns")
FP8_CAST_LEAST_COLUMNS = assumed(__file__, "fp8_cast_least_columns")
SERVING = ("sglang", "trtllm", "vllm")  # software that AIConfigurator measures
# no assumption: shares of a sweep
GPU_DTYPES = {"bf16": 0.45, "fp32": 0.23, "tf32": 0.23, "fp16": 0.03, "fp8": 0.06}
WHOLE_ROWS = {"grouped_mm": 8, "scaled_mm": 16}  # elements that 16 bytes hold: kernels want those
MAX_ALIGNED = 128  # bytes: of a cache line
THIN = 64  # a side of a product up to this stays: one token a sequence, few classes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One matrix product in BLAS names.

    - ``layout``: for A and for B whether it is contiguous (n) or a transposed view (t).
    - scaled_mm: fp8 matrices with one scale each, result in bf16; casts are not included.
    - grouped_mm: one product for each of ``batch`` experts. Each has m tokens; in layout tn, the
      gradient of its weights, k tokens that are summed over.
    """

    op: str = "mm"
    m: int
    n: int
    k: int
    batch: int = 1
    layout: str = "nn"
    dtype: str = "fp32"


def _fits(p: Gemm) -> bool:
    return bool(flops(p) <= MAX_FLOPS)


def build(p: Gemm, device: str) -> Workload:
    """Random operands, transposed views where the layout says so.

    Outside bf16 torch runs grouped_mm one expert after the other, and waits for the GPU to learn
    how many tokens each has (_grouped_mm_fallback in ATen/native/GroupedMMUtils.h): not one op.
    """
    if p.op == "grouped_mm":
        if device == "cuda" and p.dtype != "bf16":
            raise NotImplementedError("grouped_mm is timed in bf16 alone: others wait for the host")
        return _grouped(p, device)

    def operand(rows: int, cols: int, transposed: bool) -> Tensor:
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
        scalar = torch.ones((), device=device)
        return Workload(
            run=lambda: torch._scaled_mm(a, b, scalar, scalar, out_dtype=torch.bfloat16),
            through_aten=False,
        )
    if p.op == "addmm":
        return Workload(run=lambda: torch.addmm(bias, a, b), through_aten=False)
    return Workload(run=lambda: torch.mm(a, b), through_aten=False)


def _grouped(p: Gemm, device: str) -> Workload:
    """A grouped_mm of equal shares; tokens are sorted by expert as in Hugging Face's models."""

    def operand(*shape: int) -> Tensor:
        return repeated(torch.randn, shape, device).to(torch_dtype(p.dtype))

    tokens = p.k if p.layout == "tn" else p.m  # of each expert
    ends = torch.arange(1, p.batch + 1, dtype=torch.int32, device=device) * tokens
    if p.layout == "tn":
        a, b = operand(p.batch * tokens, p.m).t(), operand(p.batch * tokens, p.n)
    elif p.layout == "nt":
        a, b = operand(p.batch * tokens, p.k), operand(p.batch, p.n, p.k).transpose(1, 2)
    else:
        a, b = operand(p.batch * tokens, p.k), operand(p.batch, p.k, p.n)
    return Workload(run=lambda: torch._grouped_mm(a, b, ends), through_aten=False)


def flops(p: Gemm) -> Numbers:
    """2*batch*m*n*k: a multiply and an add per term."""
    return 2.0 * p.batch * p.m * p.n * p.k


def bytes_moved(p: Gemm) -> Numbers:
    """Lower bound: A and B read once, C written once; real traffic is higher."""
    return 1.0 * p.batch * (p.m * p.k + p.k * p.n + p.m * p.n) * itemsize_bytes(p.dtype)


def features(p: Gemm, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, aspect ratios, and how many waves of usual tiles fill the SMs, and how well."""
    cache_per_element = 1.0 * np.asarray(itemsize_bytes(p.dtype)) * p.batch / gpu.l2_bytes
    columns = {
        "op": p.op,
        "layout": p.layout,
        "dtype": p.dtype,
        **logs(p, "m", "n", "k", "batch"),
        "log_m_over_n": np.log2(1.0 * p.m / p.n),
        "log_k_over_mn": np.log2(p.k / np.sqrt(1.0 * p.m * p.n)),
        "log_a_fill": np.log2(cache_per_element * p.m * p.k),
        "log_b_fill": np.log2(cache_per_element * p.n * p.k),
        "log_c_fill": np.log2(cache_per_element * p.m * p.n),
        "m_mod_16": p.m % 16,
        "n_mod_16": p.n % 16,
        "k_mod_16": p.k % 16,
        "m_mod_128": p.m % 128,
        "n_mod_128": p.n % 128,
        "m_odd": p.m % 2,
        **_alignments(p),
    }
    for rows, cols in TILES:
        tiles = p.batch * np.ceil(p.m / rows) * np.ceil(p.n / cols)
        waves, name = tiles / gpu.sm_count, f"{rows}x{cols}"
        columns[f"log_waves_{name}"] = np.log2(waves)
        columns[f"wave_fill_{name}"] = waves / np.ceil(waves)
        columns[f"tile_fill_{name}"] = 1.0 * p.m * p.n * p.batch / (tiles * rows * cols)
    return columns


def _rows(p: Gemm) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths of the rows of A, B and C in memory: their leading dimensions in BLAS's words."""
    a_turned, b_turned = (is_any(p.layout, those) for those in (("tn", "tt"), ("nt", "tt")))
    return np.where(a_turned, p.m, p.k), np.where(b_turned, p.k, p.n), np.asarray(p.n)


def _alignments(p: Gemm) -> dict[str, Numbers]:
    """log2 of the bytes, up to MAX_ALIGNED, to which all rows of A, B and C are aligned.

    A row begins at a multiple of its length, in a batch, too. Kernels differ for rows aligned to 16
    bytes (what a thread loads at once, and TMA needs), 8, 4 and 2; those of whole cache lines are
    read by fewer transactions.
    """
    alignments, least = {}, np.asarray(np.log2(MAX_ALIGNED))
    for name, length in zip("abc", _rows(p), strict=True):
        nbytes = (length * itemsize_bytes(p.dtype)).astype(np.int64)
        aligned = np.minimum(nbytes & -nbytes, MAX_ALIGNED)
        alignments[f"log_{name}_aligned"] = np.log2(aligned)
        least = np.minimum(least, alignments[f"log_{name}_aligned"])
    return {**alignments, "log_least_aligned": least}


def rate(p: Gemm, gpu: Gpu) -> Numbers:
    """Upper bound in FLOP/s where a row of an operand or of the result has an odd length.

    Tensor cores read 16-byte rows; for others NVIDIA's libraries take kernels of the generation
    before Ampere:
        rate = max(old_peak_frac * peak, old_flops_per_clock * SMs * clock), twice that in 16 bit.
    """
    odd = np.any([row % 2 for row in _rows(p)], axis=0) & is_any(p.dtype, TENSOR_CORES)
    in_16_bit = ~np.asarray(is_any(p.dtype, ("tf32",)))
    old_rate = (1 + in_16_bit) * OLD_FLOPS_PER_CLOCK * gpu.sm_count * gpu.clock_hz
    old_rate = np.maximum(
        old_rate, np.where(in_16_bit, gpu.peak("fp16"), gpu.peak("tf32")) * OLD_PEAK_FRAC
    )
    return np.where(odd & (gpu.vendor == "nvidia") & (gpu.kind == "gpu"), old_rate, np.inf)


def _layout(a: TensorSpec, b: TensorSpec) -> str:
    """For each factor n if its rows lie in memory one after the other, else t (``Gemm.layout``)."""
    return "".join("n" if t.stride == () or t.stride[-1] == 1 else "t" for t in (a, b))


def from_mm(call: OpCall) -> Gemm | None:
    """Describe mm(A, B), addmm(bias, A, B), bmm(A, B) or baddbmm(C, A, B) as logged.

    Kernels of 8 and 4 bits have one layout, nt: other operands are transposed when they are cast.
    addbmm(C, A, B) runs a product for each of a batch.
    """
    kind = MATRICES[call.op.split(".")[1]]
    a, b = call.args[1:3] if call.op.split(".")[1] in WITH_SUM else call.args[:2]
    batch, layout = a.shape[0] if kind == "bmm" else 1, _layout(a, b)
    m, k = a.shape[-2:]
    if a.dtype in NARROW:
        kind, layout = "scaled_mm", "nt"
    elif kind == "scaled_mm":  # packed numbers
        return None
    return Gemm(op=kind, m=m, n=b.shape[-1], k=k, batch=batch, layout=layout, dtype=a.dtype)


def from_integers(call: OpCall) -> Gemm:
    """Describe a product by integers of 8 or 4 bits: _int_mm(A, B), or A by packed weights.

    It is described as a product in 16 bits, since only these were measured.
    """
    a, result = call.args[0], call.outputs[0]
    dtype = "fp16" if a.dtype == "int8" else a.dtype
    return Gemm(op="mm", m=a.shape[0], n=result.shape[-1], k=a.shape[-1], layout="nt", dtype=dtype)


def from_vector(call: OpCall) -> Gemm | None:
    """Describe mv(A, x), addmv(y, A, x), dot(x, y) or vdot(x, y): products with one column."""
    op = call.op.split(".")[1]
    a, x = call.args[1:3] if op in WITH_SUM else call.args[:2]
    kind, m = ("addmm" if op in WITH_SUM else "mm"), (a.shape[0] if len(a.shape) > 1 else 1)
    return Gemm(op=kind, m=m, n=1, k=x.shape[0], layout=_layout(a, x), dtype=a.dtype)


def from_grouped(call: OpCall) -> Gemm | None:
    """Describe _grouped_mm(A, B, ends): every expert takes an equal share of tokens, rounded up.

    (tokens, k) x (experts, k, n), or for weights' gradients (m, tokens) x (tokens, n).
    """
    a, b, experts = call.args[0], call.args[1], call.args[2].shape[0]
    m, k = a.shape
    weight_gradient = len(b.shape) == 2
    m, k = (m, -(-k // experts)) if weight_gradient else (-(-m // experts), k)
    layout = "tn" if weight_gradient else "n" + _layout(a, b)[1]
    kind, layout = ("scaled_mm", "nt") if a.dtype in NARROW else ("grouped_mm", layout)
    return Gemm(op=kind, m=m, n=b.shape[-1], k=k, batch=experts, layout=layout, dtype=a.dtype)


def retype(p: Gemm, dtype: str, gpu: Gpu) -> Gemm | None:
    """Converts the point to a dtype; fp8 becomes ``scaled_mm`` with sides of whole 16 bytes.

    grouped_mm stays in bf16; None on GPUs without one kernel for all experts.
    """
    if dtype == "fp8":
        m, n, k = (16 * max(1, round(s / 16)) for s in (p.m, p.n, p.k))
        return Gemm(op="scaled_mm", m=m, n=n, k=k, layout="nt", dtype="fp8")
    if p.op == "grouped_mm":
        return replace(p, dtype="bf16") if gpu.architecture in GROUPED_ON else None
    return replace(p, dtype=dtype)


def resize(p: Gemm, factor: float, first_share: float) -> Gemm:
    """Grows all sides by the same factor; a batch of products grows in number first."""
    if p.op == "bmm":
        batch = min(max(4096, p.batch), max(1, round(p.batch * factor**first_share)))
        factor *= p.batch / batch
        p = replace(p, batch=batch)
    sides = {side: getattr(p, side) for side in "mnk"}
    wide = [side for side, n in sides.items() if n > THIN] or list(sides)
    step = factor ** (1 / len(wide))
    changed: Point = {s: min(MAX_SIDE, aligned(sides[s] * step, sides[s])) for s in wide}
    if p.op in WHOLE_ROWS:
        unit = WHOLE_ROWS[p.op]
        changed = {s: unit * max(1, round(n / unit)) for s, n in changed.items()}
    return replace(p, **changed)


def fallback(p: Gemm, measured: Measured) -> list[Part]:
    """Prices grouped_mm where a GPU has no kernel for it, and fp8 products, by other products.

    A matrix times a vector in fp32 is a pass over the matrix. Products in 4 bits, of which there
    are no rows, are as far from their own bound by flops and bytes as those in fp8 from theirs. No
    parts where the family's model prices the product.
    """
    if p.dtype in BLOCK_SCALED:
        in_fp8, gpu = replace(p, dtype="fp8"), measured.gpu
        ratio = _bound_s(p, gpu) / _bound_s(in_fp8, gpu)
        parts = fallback(in_fp8, measured) or [Part(family="gemm", params=in_fp8)]
        return [replace(part, times=ratio * part.times) for part in parts]
    if min(p.m, p.n) == p.batch == 1 and p.dtype == "fp32" and measured.gpu.kind != "cpu":
        return [memory_copy(float(bytes_moved(p)))]
    if p.op == "grouped_mm":
        return _one_by_one(p, measured)
    if p.op == "scaled_mm" and measured.gpu.kind != "cpu" and p.n >= FP8_CAST_LEAST_COLUMNS:
        return _without_cast(p, measured)
    return []


def _bound_s(p: Gemm, gpu: Gpu) -> float:
    """Seconds of a product at the peak or the memory's rate; the result is in bf16."""
    read = (p.m * p.k + p.k * p.n) * itemsize_bytes(p.dtype)
    written = p.m * p.n * itemsize_bytes("bf16")
    nbytes = float(p.batch * (read + written))
    return max(float(flops(p)) / gpu.peak(p.dtype), nbytes / gpu.hbm_bytes_per_s)


def _one_by_one(p: Gemm, measured: Measured) -> list[Part]:
    """A product for each expert where no kernel takes all of them.

    Whether one does depends on the GPU, so that rows of other GPUs say nothing about it.
    """
    one_kernel = p.dtype == "bf16" and measured.gpu.architecture in GROUPED_ON
    if one_kernel or measured.measured_here("gemm", p.op, p.dtype):
        return []
    return [Part(family="gemm", params=replace(p, op="mm", batch=1), times=p.batch)]


def _without_cast(p: Gemm, measured: Measured) -> list[Part]:
    """An fp8 product without the cast of its first factor; experts' products as one of all tokens.

    Rows of serving software include the cast, which training steps do once for several products.
    A product with few columns takes about as long as the cast and reading the first factor:
        time = T(m, n, k) - T(m, fp8_cast_columns, k) + time to read the first factor.
    """
    shares = measured.software_shares("gemm", p.op, p.dtype)
    casts = sum(share for name, share in shares.items() if name in SERVING)
    whole = replace(p, m=p.m * p.batch, batch=1)
    parts = [Part(family="gemm", params=whole)] if casts or p.batch > 1 else []
    if casts:
        narrow = replace(whole, n=FP8_CAST_COLUMNS)
        parts.append(Part(family="gemm", params=narrow, times=-casts))
        parts.append(replace(memory_copy(whole.m * whole.k), times=casts))
    return parts


FAMILY = Family(
    name="gemm",
    params=Gemm,
    sweep=points_of(1, SWEPT["cpu"], Gemm, _fits),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    rate=rate,
    # addmm as a linear layer calls it: weights transposed
    op_aliases={"mm": {}, "addmm": {"layout": "nt"}, "bmm": {}, "grouped_mm": {}},
    tiled=True,
    matmul=True,
    fallback=fallback,
    at_achieved_rate=True,
    answers={
        **{f"aten.{op}.default": from_mm for op in MATRICES},
        **{f"aten.{op}.dtype": from_mm for op in ("mm", "addmm", "bmm", "baddbmm")},  # of results
        **{f"aten.{op}.default": from_vector for op in ("mv", "addmv", "dot", "vdot")},
        GROUPED: from_grouped,
        **dict.fromkeys(BY_INTEGERS, from_integers),
    },
    weight=4.0,
    gpu_sweep=GpuSweep(
        points=partial(swept, stated=SWEPT["gpu"], make=Gemm),
        dtypes=GPU_DTYPES,
        retype=retype,
        resize=resize,
        slow_frac=0.5,
        compute_bound=True,
        weight=4.0,
    ),
)
