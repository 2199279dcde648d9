"""Replaces attention in captures: SDPA by separate eager ops, FlexAttention by SDPA."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from itercast.microbench.opcall import Args, Argument, Kwargs


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention by separate ops, as models do in eager mode.

    They are a product, a mask, softmax, dropout and a product. Softmax runs in fp32 under autocast,
    as on CUDA.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    mixed = torch.is_autocast_enabled(query.device.type)
    weights = torch.softmax(scores, -1, dtype=torch.float32 if mixed else None)
    return torch.dropout(weights, dropout_p, train=dropout_p > 0) @ value


@contextmanager
def attention_as(attn: str) -> Iterator[None]:
    """Replace scaled_dot_product_attention inside the context if ``attn`` is "eager"."""
    functional, whole = torch.nn.functional, torch.nn.functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = eager_attention if attn == "eager" else whole
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = whole


@contextmanager
def flex_as_sdpa() -> Iterator[None]:
    """Replace flex_attention by scaled_dot_product_attention inside the context.

    Convention: every mask costs what a causal one does, and changes to scores cost nothing.
    """
    flex: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None:
        yield
        return

    def attention(
        q: Tensor, k: Tensor, v: Tensor, score: object, mask: Args, scale: float, *rest: Argument
    ) -> Argument:
        output = torch.nn.functional.scaled_dot_product_attention(
            *(q, k, v),
            is_causal=mask[-1] is not flex.noop_mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return output, q.new_empty(q.shape[:-1]), q.new_empty(q.shape[:-1])

    changed: Kwargs = {"flex_attention_hop": attention}
    changed["_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"] = True
    changed["_validate_device"] = lambda *tensors: None  # it has no backward on CPUs
    with patch.multiple(flex, **changed):
        yield
