"""Products with a sparse matrix: SpMM (sparse @ dense) and SDDMM (dense @ dense at a pattern).

Graph networks sum over neighbours by SpMM; SDDMM makes the gradients of the edges' weights. CSR and
COO, and the transpose of CSR (csc) that a backward multiplies by. Indices are int64.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import INDEX_BYTES, ITEMSIZE_BYTES, OpCall, TensorSpec, torch_dtype
from itercast.capture.plan import ParallelPlan
from itercast.extras.lookups.embedding_bag import EmbeddingBag
from itercast.extras.lookups.random_streams import HIT_COST, HOLDS_ROWS, LINE_BYTES, zipf_indices
from itercast.extras.lookups.reuse import expected_hit_frac
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Measured,
    Numbers,
    Part,
    Tensor,
    Values,
    Workload,
    itemsize_bytes,
    logs,
)
from itercast.microbench.ops.lookup.index_calls import IndexOp
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.sizes import MAX_NUMEL, aligned, points_of

SWEPT = facts_of(__file__)
MAX_NNZ = 2**21
MAX_TERMS = 2**25  # nnz * width
MAX_DENSE = 2**24  # elements of the larger dense matrix
MAX_WIDTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """One product with a (rows, cols) matrix of ``nnz`` stored values, and ``width`` columns.

    spmm: sparse @ (cols, width). sddmm: (rows, width) @ (width, cols) where the matrix has values.
    ``skew`` is the exponent of a power law of the rows' lengths, 0 for equal ones on average; a
    captured call does not know it and has 0.
    """

    op: str = "spmm"
    rows: int
    cols: int
    nnz: int
    width: int
    layout: str = "csr"
    skew: float = 0.0
    dtype: str = "fp32"


def _graph(rows: int, each: int, cols: int = 0, **fields: Any) -> Sparse:
    """A matrix from sizes as the YAML file states them; ``each``: values of a row."""
    cols = cols or rows
    return Sparse(rows=rows, cols=cols, nnz=rows * min(each, cols // 2), **fields)


def _fits(p: Sparse) -> bool:
    small = p.nnz <= MAX_NNZ and max(p.rows, p.cols) * p.width <= MAX_DENSE
    return small and p.nnz * p.width <= MAX_TERMS


def _some_skewed(rng: np.random.Generator, p: Sparse) -> Sparse:
    return p if rng.random() < 0.5 else replace(p, skew=round(float(rng.uniform(0.5, 1.2)), 2))


def build(p: Sparse, device: str) -> Workload:
    """A random sparse matrix and random dense ones."""
    dtype = torch_dtype(p.dtype)
    matrix = _matrix(p, device)

    def dense(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    if p.op == "sddmm":
        a, b = dense(p.rows, p.width), dense(p.width, p.cols)
        return Workload(
            run=lambda: torch.sparse.sampled_addmm(matrix, a, b, beta=0.0), through_aten=False
        )
    b = dense(p.cols, p.width)
    call = torch.mm if p.layout == "csc" else torch.sparse.mm
    return Workload(run=lambda: call(matrix, b), through_aten=False)


def _matrix(p: Sparse, device: str) -> Tensor:
    """The sparse matrix; csc is made as a transposed CSR matrix, as in a backward."""
    shape = (p.cols, p.rows) if p.layout == "csc" else (p.rows, p.cols)
    place = _places(p, device)
    row, col = place // p.cols, place % p.cols
    if p.layout == "csc":
        order = torch.argsort(col, stable=True)
        row, col = col[order], row[order]
    values = torch.rand(p.nnz, device=device).to(torch_dtype(p.dtype))
    if p.layout == "coo":
        index = torch.stack((row, col))
        return torch.sparse_coo_tensor(
            index, values, shape, is_coalesced=True, check_invariants=False
        )
    starts = torch.zeros(shape[0] + 1, dtype=torch.int64, device=device)
    starts[1:] = torch.bincount(row, minlength=shape[0]).cumsum(0)
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
    matrix = torch.sparse_csr_tensor(starts, col, values, shape, check_invariants=False)
    return matrix.t() if p.layout == "csc" else matrix


def _places(p: Sparse, device: str) -> Tensor:
    """Sorted places row * cols + col of the values, all different.

    Rows are drawn like look-ups in a table; values that a full row cannot hold go anywhere.
    """
    lookups = EmbeddingBag(op="forward", rows=p.rows, dim=1, bags=1, lookups=p.nnz, skew=p.skew)
    col = torch.randint(0, p.cols, (p.nnz,), device=device)
    places = torch.unique(zipf_indices(lookups, device) * p.cols + col)
    while len(places) < p.nnz:
        more = torch.randint(0, p.rows * p.cols, (p.nnz,), device=device)
        places = torch.unique(torch.cat((places, more)))
    kept: Tensor = places[torch.randperm(len(places), device=device)[: p.nnz]]
    return kept.sort().values


def flops(p: Sparse) -> Numbers:
    """2 * nnz * width: a multiply and an add per stored value and dense column."""
    return 2.0 * p.nnz * p.width


def index_bytes(p: Sparse) -> Numbers:
    """Bytes of int64 indices: COO two a value; CSR, CSC one, and a pointer a row or column."""
    pointers = np.where(np.equal(p.layout, "csc"), p.cols, p.rows) + 1.0
    coo = np.equal(p.layout, "coo")
    return INDEX_BYTES * np.where(coo, 2.0 * p.nnz, p.nnz + pointers)


def bytes_moved(p: Sparse) -> Values:
    """Lower bound: values, indices and the dense rows in use read once, the result written once.

    spmm: min(cols, nnz) rows read, ``rows`` written; sddmm: min(rows, nnz) + min(cols, nnz) rows
    read, its values read and, as the result, written. Of addmm(C, A, B) C is not counted.
    """
    sddmm = np.equal(p.op, "sddmm")
    row_side = np.where(sddmm, np.minimum(p.rows, p.nnz), p.rows)
    dense = 1.0 * (row_side + np.minimum(p.cols, p.nnz)) * p.width
    values = np.where(sddmm, 2.0, 1.0) * p.nnz
    return (dense + values) * itemsize_bytes(p.dtype) + index_bytes(p)


def cached_bytes(p: Sparse, gpu: Gpu) -> Values:
    """``bytes_moved``, with a row of the dense matrix read for each stored value, not just once.

    Rows that the last cache holds are counted as cached; all columns are taken to hold equally many
    values. sddmm gathers columns of its second matrix so, and reads rows of its first in turn.
    """
    row_bytes = 1.0 * p.width * itemsize_bytes(p.dtype)
    once_bytes = np.minimum(p.cols, p.nnz) * row_bytes
    further_bytes = gathered_bytes(p.cols, p.nnz, row_bytes, gpu.l2_bytes) - once_bytes
    return bytes_moved(p) + np.maximum(0.0, further_bytes)


def longest_row(p: Sparse) -> Numbers:
    """Expected number of stored values in the longest row, at most ``cols``.

    Row lengths follow a power law: nnz / sum(r**-skew for r = 1..rows), the sum as an integral.
    """
    rows, power = np.asarray(p.rows, dtype=float), 1.0 - np.asarray(p.skew, dtype=float)
    skew_is_1 = np.abs(power) < 1e-6
    power = np.where(skew_is_1, 1.0, power)
    harmonic = np.where(
        skew_is_1, np.log(2 * rows + 1), ((rows + 0.5) ** power - 0.5**power) / power
    )
    longest = np.maximum(1.0 * p.nnz / p.rows, p.nnz / np.maximum(1.0, harmonic))
    return np.minimum(longest, p.cols)


def features(p: Sparse, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, values per row and in the longest row, and how much of the cache B fills."""
    gathered = 1.0 * p.cols * p.width * itemsize_bytes(p.dtype)
    return {
        "op": p.op,
        "layout": p.layout,
        "dtype": p.dtype,
        "skew": p.skew,
        **logs(p, "rows", "cols", "nnz", "width"),
        "log_nnz_per_row": np.log2(p.nnz / p.rows),
        "log_longest_row": np.log2(longest_row(p)),
        "log_dense_per_cache": np.log2(gathered / gpu.l2_bytes),
        "log_rows_per_core": np.log2(p.rows / gpu.sm_count),
        "log_terms_per_core": np.log2(1.0 * p.nnz * p.width / gpu.sm_count),
        "width_mod_8": p.width % 8,
    }


def from_mm(call: OpCall) -> Sparse | None:
    """Describe mm(A, B), mv(A, x), addmm(C, A, B) or _sparse_addmm(C, A, B) with one sparse factor.

    A sparse second factor is A.T @ sparse.T: the same kernel on the transposed matrix.
    """
    a, b = call.args[1:3] if "addmm" in call.op else call.args[:2]
    if a.layout and not b.layout:
        return _made("spmm", a, b.shape[1] if len(b.shape) > 1 else 1)
    if b.layout and not a.layout and len(a.shape) > 1:
        layout = {"csr": "csc", "csc": "csr"}.get(b.layout, b.layout)
        return _made("spmm", replace(b, shape=b.shape[::-1], layout=layout), a.shape[0])
    return None


def from_sampled(call: OpCall) -> Sparse | None:
    """Describe sparse_sampled_addmm(pattern, A, B)."""
    return _made("sddmm", call.args[0], call.args[1].shape[-1])


def _made(op: str, matrix: TensorSpec, width: int) -> Sparse | None:
    """The parameters; None for batches of matrices and where nothing is stored."""
    if len(matrix.shape) != 2 or min(*matrix.shape, matrix.nnz, width) < 1:
        return None
    rows, cols = matrix.shape
    return Sparse(
        op=op,
        rows=rows,
        cols=cols,
        nnz=matrix.nnz,
        width=width,
        layout=matrix.layout,
        dtype=matrix.dtype,
    )


def fallback(p: Sparse, measured: Measured) -> list[Part]:
    """Ops that stand for a product on a CPU where none of its op and dtype was measured.

    They are a gather of a dense row for each stored value, and a copy of ``bytes_moved``. On a GPU
    there are none: the roofline prices it, with ``cached_bytes``.
    """
    if measured.gpu.kind != "cpu" or measured.seen("sparse", p.op, p.dtype):
        return []
    if measured.has_model("index"):
        gather = IndexOp(
            op="index_select", outer=1, size=p.nnz, inner=p.width, source=p.cols, dtype=p.dtype
        )
        rows = Part(family="index", params=gather)
    else:
        rows = memory_copy(p.nnz * p.width * ITEMSIZE_BYTES[p.dtype])
    return [rows, memory_copy(float(bytes_moved(p)))]


def retype(p: Sparse, dtype: str, gpu: Gpu) -> Sparse:
    """The point in a dtype; SDDMM and COO stay in fp32, since CUDA has no half kernels for them.

    Source: torch 2.11, SparseBlasImpl.cpp and SparseBlasLegacy.cpp in ATen/native/sparse/cuda.
    """
    return p if p.op == "sddmm" or p.layout == "coo" else replace(p, dtype=dtype)


def resize(p: Sparse, factor: float, first_share: float) -> Sparse:
    """Grows rows, columns and values, as many a row as before; then the dense width."""
    step = factor ** (0.5 + first_share / 2)
    step = min(step, max(1.0, MAX_NUMEL / 16 / max(p.rows, p.cols, p.nnz)))
    rows, cols = (max(2, round(side * step)) for side in (p.rows, p.cols))
    nnz = max(1, min(round(p.nnz * step), rows * cols // 2))
    width = min(max(MAX_WIDTH, p.width), aligned(p.width * factor * p.nnz / nnz, p.width))
    return replace(p, rows=rows, cols=cols, nnz=nnz, width=width)


MATRIX_OPS = ("mm.default", "addmm.default", "_sparse_addmm.default", "mv.default")


def gathered_bytes(
    rows: Numbers, lookups: Numbers, row_bytes: Numbers, cache_bytes: Numbers
) -> Values:
    """Bytes that scattered reads of equally likely rows take; rows below a line share lines.

    See ``row_bytes_from_memory``.
    """
    line_bytes = LINE_BYTES * np.ceil(row_bytes / LINE_BYTES)
    lines = np.ceil(rows * np.minimum(1.0, row_bytes / LINE_BYTES))
    hits = expected_hit_frac(lines, lookups, 0.0, 0.0, HOLDS_ROWS * cache_bytes / line_bytes)
    return lookups * line_bytes * (1 - (1 - HIT_COST) * hits)


def whole_matrix(points: Sequence[Sparse], plan: ParallelPlan) -> Iterator[str]:
    """Say that a plan does not cut the matrix among its replicas."""
    if points and plan.dp > 1 and "cut" not in plan.stated:
        p = max(points, key=lambda p: p.nnz)
        size = f"{p.rows:,} x {p.cols:,} with {p.nnz:,} values"
        text = f"each of {plan.dp} replicas has a sparse matrix of its own, of {size}"
        yield f"{text}; the plan key cut=SHARE cuts one among them"


FAMILY = Family(
    name="sparse",
    params=Sparse,
    sweep=points_of(18, SWEPT, _graph, _fits, _some_skewed),
    build=build,
    flops=flops,
    product_flops=flops,
    bytes_moved=bytes_moved,
    cached_bytes=cached_bytes,
    features=features,
    answers={
        **{f"aten.{op}": from_mm for op in MATRIX_OPS},
        "aten.sparse_sampled_addmm.default": from_sampled,
    },
    layouts=("csr", "csc", "coo"),
    fallback=fallback,
    note=whole_matrix,
    weight=0.5,
    gpu_sweep=GpuSweep(retype=retype, resize=resize),
)
