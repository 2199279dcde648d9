"""Attention of xformers, which has no kernels where there is no GPU, as torch's attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from itercast.capture.base.slow_imports import once_imported


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    """As ``xformers.ops.memory_efficient_attention``, of (batch, length, heads, width).

    Sequences that a bias packs into one batch, (1, tokens, heads, width), are taken to be of mean
    length; rows of the result that rounding it loses are copies of the first.
    """
    packed = getattr(attn_bias, "q_seqinfo", None)
    sequences = len(packed.seqstart_py) - 1 if packed else 1

    def heads_first(tensor: Tensor) -> Tensor:
        heads = tensor.unsqueeze(2) if tensor.dim() == 3 else tensor.flatten(2, -2)
        if packed:
            divisible = heads.shape[1] // sequences * sequences
            heads = heads[0, :divisible].unflatten(0, (sequences, -1))
        return heads.transpose(1, 2)

    result = torch.nn.functional.scaled_dot_product_attention(
        heads_first(query),
        heads_first(key),
        heads_first(value),
        attn_mask=attn_bias if isinstance(attn_bias, Tensor) else None,
        dropout_p=p,
        is_causal=any(name in type(attn_bias).__name__ for name in ("Causal", "LowerTriangular")),
        scale=scale,
    )
    rows = result.transpose(1, 2).flatten(0, 1)
    if packed:
        lost = query.shape[0] * query.shape[1] - len(rows)
        rows = torch.cat([rows, rows[:1].expand(lost, -1, -1)])
    return rows.reshape(*query.shape[:-1], value.shape[-1])


@contextmanager
def xformers_attention() -> Iterator[None]:
    """Let ``xformers.ops``, imported inside the context or before, run torch's attention."""
    originals = list[tuple[Any, Any]]()

    def replace(module: Any) -> None:
        originals.append((module, module.memory_efficient_attention))
        module.memory_efficient_attention = _attend

    try:
        with once_imported("xformers.ops", replace):
            yield
    finally:
        for module, original in originals:
            module.memory_efficient_attention = original
