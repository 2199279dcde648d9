"""Scaled dot-product attention, forward and backward, causal or not, grouped-query or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import OpCall, torch_dtype
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
    differentiated,
    itemsize_bytes,
)
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.memory.reduction import Reduction
from itercast.microbench.ops.sizes import MATMUL_DTYPES, MAX_BATCH, aligned, points_of, swept
from itercast.microbench.store import Row

BACKWARD_OVER_FORWARD: float = assumed(__file__, "backward_over_forward")
MAX_FLOPS = 8e9
MAX_SCORES = 2**24  # where dropout or a mask makes the scores a tensor in memory
MAX_LENGTH = 32768  # of a sequence
SWEPT = facts_of(__file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One call on query (batch, heads, q_len, head_dim) and key and value of kv_heads and kv_len.

    ``masked``: a bool mask (batch, 1, q_len, kv_len) is given; ``dropout``: dropout_p > 0.
    """

    op: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool
    masked: bool = False
    dropout: bool = False
    dtype: str = "fp32"


def _fits(p: Attention) -> bool:
    in_memory = (p.dropout or p.masked) and p.batch * p.heads * p.q_len * p.kv_len > MAX_SCORES
    return bool(not in_memory and flops(p) < MAX_FLOPS and bytes_moved(p) < 2e8)


def _call(
    heads: int, groups: int, length: int, lengths: str, kind: str, other: int, **fields: Any
) -> Attention:
    """A call whose sizes are stated as in the YAML file.

    ``groups``: query heads per key head, where they divide ``heads``; ``lengths``: self, cross
    (keys of length ``other``) or decode (one query); ``kind``: causal, masked or neither.
    """
    decodes = lengths == "decode"
    return Attention(
        **{**fields, "op": "forward" if decodes else fields["op"]},
        heads=heads,
        kv_heads=heads // groups if heads % groups == 0 else heads,
        q_len=1 if decodes else length,
        kv_len=other if lengths == "cross" else length,
        causal=kind == "causal" and lengths == "self",
        masked=kind == "masked",
    )


def build(p: Attention, device: str) -> Workload:
    """Random query, key and value; the backward keeps its graph for all repetitions.

    On a GPU torch chooses the kernel also by whether gradients are required. They are here, as in
    training, except for a single query, as in decoding (sdp_utils.cpp in
    aten/src/ATen/native/transformers/cuda).
    """

    def tensor(heads: int, length: int) -> Tensor:
        shape = (p.batch, heads, length, p.head_dim)
        return torch.randn(shape, device=device).to(torch_dtype(p.dtype))

    q, k, v = (tensor(p.heads, p.q_len), *(tensor(p.kv_heads, p.kv_len) for _ in "kv"))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    options: Row = {"is_causal": p.causal, "enable_gqa": p.kv_heads != p.heads}
    if p.masked:
        mask = torch.rand(p.batch, 1, p.q_len, p.kv_len, device=device) < 0.9
        mask[..., 0] = True  # no query without a key
        options["attn_mask"] = mask
    options["dropout_p"] = 0.1 if p.dropout else 0.0
    trains = p.op == "backward" or (device != "cpu" and p.q_len > 1)
    for leaf in (q, k, v):
        leaf.requires_grad_(trains)
    if p.op == "forward":
        return Workload(run=lambda: sdpa(q, k, v, **options), through_aten=False)
    out = sdpa(q, k, v, **options)
    return differentiated(out, (q, k, v), torch.randn_like(out))


def flops(p: Attention) -> Numbers:
    """Two products of 2 b h q k d each forward, five backward; a causal mask leaves a triangle.

    The triangle ignores the diagonal's half: query i sees i of kv_len keys.
    """
    products = np.where(np.equal(p.op, "forward"), 2.0, 5.0)
    ratio = p.q_len / p.kv_len
    triangle = np.where(ratio <= 1, 0.5 * ratio, 1 - 0.5 / ratio)
    share = np.where(p.causal, triangle, 1.0)
    return products * share * 2 * p.batch * p.heads * p.q_len * p.kv_len * p.head_dim


def bytes_moved(p: Attention) -> Values:
    """Q, K, V read and O written once; backward moves twice that; a mask has a byte per pair."""
    passes = np.where(np.equal(p.op, "forward"), 1.0, 2.0)
    rows = 2 * p.heads * p.q_len + 2 * p.kv_heads * p.kv_len
    mask = np.where(p.masked, 1.0, 0.0) * p.batch * p.q_len * p.kv_len
    return passes * p.batch * rows * p.head_dim * itemsize_bytes(p.dtype) + mask


def features(p: Attention, gpu: Gpu) -> dict[str, Numbers | str]:
    """Lengths, heads, and how blocks of 128 queries fill the SMs."""
    blocks = p.batch * p.heads * np.ceil(p.q_len / 128)
    waves = blocks / gpu.sm_count
    return {
        "op": p.op,
        "dtype": p.dtype,
        "causal": np.where(p.causal, 1.0, 0.0),
        "masked": np.where(p.masked, 1.0, 0.0),
        "dropout": np.where(p.dropout, 1.0, 0.0),
        "log_bh": np.log2(p.batch * p.heads),
        "log_q": np.log2(p.q_len),
        "log_kv": np.log2(p.kv_len),
        "log_q_per_kv": np.log2(p.q_len / p.kv_len),
        "log_scores": np.log2(1.0 * p.batch * p.heads * p.q_len * p.kv_len),
        "head_dim": p.head_dim,
        "head_dim_mod_32": p.head_dim % 32,
        "group": p.heads / p.kv_heads,
        "log_waves": np.log2(waves),
        "wave_fill": waves / np.ceil(waves),
        "block_fill": p.q_len / (128 * np.ceil(p.q_len / 128)),
        "kv_mod_16": p.kv_len % 16,
    }


def from_call(call: OpCall) -> Attention | None:
    """Describe a call of itercast.sdpa(q, k, v) or itercast.sdpa_backward(grad, q, k, v).

    q, k and v are (batch..., heads, length, head_dim), or (batch, length, head_dim) of one head;
    None for fewer axes. The keyword ``sequences`` states others of unlike length
    (``itercast.extras.lengths.sequences``).
    """
    backward = call.op.endswith("backward")
    q, k = call.args[1:3] if backward else call.args[:2]
    if len(q.shape) < 3:
        return None
    headless = len(q.shape) == 3
    batch, q_len, kv_len = prod(q.shape[: -2 if headless else -3]), q.shape[-2], k.shape[-2]
    if "sequences" in call.kwargs:
        count, rows, length = call.kwargs["sequences"]
        batch, q_len, kv_len = max(1, batch * count // rows), length, length
    return Attention(
        op="backward" if backward else "forward",
        batch=batch,
        heads=1 if headless else q.shape[-3],
        kv_heads=1 if headless else k.shape[-3],
        q_len=q_len,
        kv_len=kv_len,
        head_dim=q.shape[-1],
        causal=bool(call.kwargs.get("is_causal", False)),
        masked=bool(call.kwargs.get("masked", False)),
        dropout=call.kwargs.get("dropout_p", 0.0) > 0,
        dtype=q.dtype,
    )


def resize(p: Attention, factor: float, first_share: float) -> Attention:
    """Grows the number of sequences, then their lengths; a single query stays one."""
    batch = min(max(MAX_BATCH, p.batch), max(1, round(p.batch * factor**first_share)))
    length_factor = factor * p.batch / batch
    if p.q_len == 1:
        return replace(p, batch=batch, kv_len=aligned(p.kv_len * length_factor, p.kv_len))
    limit = max(MAX_LENGTH, p.q_len, p.kv_len)
    q_len, kv_len = (min(limit, aligned(n * length_factor**0.5, n)) for n in (p.q_len, p.kv_len))
    return replace(p, batch=batch, q_len=q_len, kv_len=kv_len)


def allocated_bytes(p: Attention) -> float:
    """Three tensors of scores where no fused kernel takes the call."""
    if not is_unfused(p):
        return 0.0
    return 3.0 * p.batch * p.heads * p.q_len * p.kv_len * float(itemsize_bytes(p.dtype))


def is_unfused(p: Attention) -> bool:
    """Whether no fused kernel of a GPU takes the call: grouped queries in 32 bits or with a mask.

    The flash kernels are of 16 bits and take no mask, the memory-efficient ones no grouped queries
    (``check_batch_size_and_num_heads_dense`` in sdp_utils_cpp.h, sdp_utils.cpp): torch runs
    ``_scaled_dot_product_attention_math``.
    """
    return p.kv_heads != p.heads and (p.masked or p.dtype not in ("fp16", "bf16"))


def _unfused(p: Attention) -> list[Part]:
    """Products and softmax over scores in memory, and the passes over memory between them.

    Keys and values are copied for every head, queries and keys scaled, a mask, causal or given, is
    added to the scores, and rows without a key are set to 0 (``_safe_softmax``). In backward the
    gradients of the copies are added up again. Source: torch 2.11, transformers/attention.cpp.
    """
    count, item = p.batch * p.heads, float(itemsize_bytes(p.dtype))
    # bytes: of all scores, queries and keys, and of a mask with a byte for each score
    scores, queries = item * count * p.q_len * p.kv_len, item * count * p.q_len * p.head_dim
    keys, mask = item * count * p.kv_len * p.head_dim, float(count * p.q_len * p.kv_len)

    def product(m: int, n: int, k: int, layout: str) -> Part:
        """A product of (m, k) by (k, n) for every head of every sample."""
        params = Gemm(op="bmm", m=m, n=n, k=k, batch=count, layout=layout, dtype=p.dtype)
        return Part(family="gemm", params=params)

    q, kv, d = p.q_len, p.kv_len, p.head_dim
    op = "_softmax" if p.op == "forward" else "_softmax_backward_data"
    softmax = Reduction(op=op, outer=count * q, size=kv, dtype="fp32")
    parts = [Part(family="reduction", params=softmax)]
    copy = keys * (1 + p.kv_heads / p.heads)  # of keys or of values, read and written
    passes = [2 * queries, 2 * keys, copy, copy]  # queries and keys are scaled
    if p.op == "forward":
        parts += [product(q, kv, d, "nt"), product(q, d, kv, "nn")]
        rows = [scores + mask, mask, 2 * scores]  # which are all -inf: eq, all, where
        passes += [*rows, 2 * scores] if p.causal or p.masked else rows
    else:
        parts += [product(kv, d, q, "tn"), product(q, kv, d, "nt")]
        parts += [product(q, d, kv, "nn"), product(kv, d, q, "tn")]
    return [*parts, *map(memory_copy, passes)]


# no flash: check_flash_attention_hardware_support in sdp_utils.cpp
BEFORE_AMPERE = ("pascal", "volta", "turing")
AFTER_AMPERE = ("hopper", "blackwell", "blackwell-ultra")


def fallback(p: Attention, measured: Measured) -> list[Part]:
    """Prices what no kernel fuses by its parts, other backwards without rows by the forward.

    Memory-efficient kernels compute fp32 as three products in TF32 (OpMultiplyAddFastF32 in torch's
    mem_eff_attention/gemm_kernel_utils.h). Rows are of a GPU whose units for it are not the bound.
    In 16 bit rows of Hopper and Blackwell say nothing of older GPUs: flash-attention 2 is written
    for Ampere, and reaches a smaller share of the peak of the GPUs after it.
    """
    if measured.gpu.kind == "cpu":
        return []
    if is_unfused(p) or (p.kv_heads != p.heads and measured.gpu.architecture in BEFORE_AMPERE):
        return _unfused(p)
    rate, maker = measured.gpu.peak_flops_per_s, measured.gpu.vendor
    by_three = p.dtype == "fp32" and maker == "nvidia" and rate.get("tf32", 0) > 3 * rate["fp32"]
    if by_three and measured.seen("attention", p.op, "tf32"):
        return [Part(family="attention", params=replace(p, dtype="tf32"), checked=True)]
    rows_apply = p.dtype not in ("fp16", "bf16") or measured.gpu.architecture in AFTER_AMPERE
    seen = measured.seen if rows_apply else measured.measured_here
    if p.op != "backward" or seen("attention", "backward", p.dtype):
        return []
    forward = Part(family="attention", params=replace(p, op="forward"), times=BACKWARD_OVER_FORWARD)
    return [replace(forward, checked=p.dtype in ("fp16", "bf16") and not p.masked)]


FAMILY = Family(
    name="attention",
    params=Attention,
    sweep=points_of(4, SWEPT["cpu"], _call, _fits),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    matmul=True,
    by_roofline=True,
    fallback=fallback,
    answers={"itercast.sdpa": from_call, "itercast.sdpa_backward": from_call},
    weight=2.0,
    gpu_sweep=GpuSweep(
        points=partial(swept, stated=SWEPT["gpu"], make=_call),
        dtypes=MATMUL_DTYPES,
        resize=resize,
        allocated_bytes=allocated_bytes,
        slow_frac=0.2,
        compute_bound=True,
        weight=2.0,
    ),
)
