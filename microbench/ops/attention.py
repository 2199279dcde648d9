"""Scaled dot-product attention, forward and backward, causal or not, grouped-query or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall
from microbench.ops.family import Family, Workload, itemsize_bytes, log_uniform, torch_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Query (batch, heads, q_len, head_dim), key and value (batch, kv_heads, kv_len, head_dim)."""

    op: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool
    dtype: str = "fp32"


def sweep() -> Iterator[Attention]:
    """Endless: self-attention of 8 to 2048 tokens."""
    rng = np.random.default_rng(4)
    while True:
        heads = int(rng.choice([1, 2, 4, 6, 8, 12, 16]))
        groups = int(rng.choice([1, 1, 2, 4]))
        length = log_uniform(rng, 8, 2048)
        p = Attention(
            op=str(rng.choice(["forward", "backward"])),
            batch=log_uniform(rng, 1, 64),
            heads=heads,
            kv_heads=heads // groups if heads % groups == 0 else heads,
            q_len=length,
            kv_len=length,
            head_dim=int(rng.choice([16, 32, 64, 128])),
            causal=bool(rng.random() < 0.5),
        )
        if flops(p) < 8e9:
            yield p


def build(p: Attention, device: str) -> Workload:
    """The backward keeps its graph, so that one forward serves all repetitions."""
    import torch  # lazy: formulas must import where torch is absent

    def tensor(heads: int, length: int) -> Any:
        shape = (p.batch, heads, length, p.head_dim)
        return torch.randn(shape, device=device).to(torch_dtype(p.dtype))

    q, k, v = (tensor(p.heads, p.q_len), *(tensor(p.kv_heads, p.kv_len) for _ in "kv"))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    options: dict[str, Any] = {"is_causal": p.causal, "enable_gqa": p.kv_heads != p.heads}
    if p.op == "forward":
        return Workload(run=lambda: sdpa(q, k, v, **options))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = sdpa(*leaves, **options)
    grad = torch.randn_like(out)
    return Workload(run=lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))


def flops(p: Any) -> Any:
    """Two products of 2 b h q k d each forward, five backward; a causal mask halves them."""
    products = np.where(np.equal(p.op, "forward"), 2.0, 5.0)
    share = np.where(p.causal, 0.5, 1.0)
    return products * share * 2 * p.batch * p.heads * p.q_len * p.kv_len * p.head_dim


def bytes_moved(p: Any) -> Any:
    """Q, K, V read and O written once; backward moves twice that."""
    passes = np.where(np.equal(p.op, "forward"), 1.0, 2.0)
    rows = 2 * p.heads * p.q_len + 2 * p.kv_heads * p.kv_len
    return passes * p.batch * rows * p.head_dim * itemsize_bytes(p.dtype)


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
    """Lengths, heads, and blocks of 128 queries per core."""
    blocks = p.batch * p.heads * np.ceil(p.q_len / 128)
    return {
        "op": p.op,
        "dtype": p.dtype,
        "causal": np.where(p.causal, 1.0, 0.0),
        "log_bh": np.log2(p.batch * p.heads),
        "log_q": np.log2(p.q_len),
        "log_kv": np.log2(p.kv_len),
        "head_dim": p.head_dim,
        "group": p.heads / p.kv_heads,
        "log_waves": np.log2(blocks / gpu.sm_count),
    }


def from_call(call: OpCall) -> Attention:
    """itercast.sdpa(q, k, v), itercast.sdpa_backward(grad, q, k, v)."""
    backward = call.op.endswith("backward")
    q, k = call.args[1:3] if backward else call.args[:2]
    return Attention(
        op="backward" if backward else "forward",
        batch=q.shape[0],
        heads=q.shape[-3],
        kv_heads=k.shape[-3],
        q_len=q.shape[-2],
        kv_len=k.shape[-2],
        head_dim=q.shape[-1],
        causal=bool(call.kwargs.get("is_causal", False)),
        dtype=q.dtype,
    )


FAMILY = Family(
    name="attention",
    params=Attention,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={"itercast.sdpa": from_call, "itercast.sdpa_backward": from_call},
)
