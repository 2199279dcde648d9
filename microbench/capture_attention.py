"""Attention in a capture: one op each way, or written out."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode


class Log(Protocol):
    """What attention needs of ``capture.OpLog``."""

    paused: int

    def add(self, op: str, args: Any, kwargs: Any, output: Any) -> None:
        """Log one call."""


class _LoggedAttention(torch.autograd.Function):
    """Scaled dot-product attention as one op forward and one op backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, log: Log, mask: Any, options: dict[str, Any], q: Any, k: Any, v: Any
    ) -> Any:
        ctx.log, ctx.mask, ctx.options = log, mask, options
        ctx.save_for_backward(q, k, v)
        log.paused += 1
        if torch._guards.detect_fake_mode((q,)):
            output = torch.empty_like(q[..., :1]).expand(*q.shape[:-1], v.shape[-1]).contiguous()
        else:
            call = torch.nn.functional.scaled_dot_product_attention
            output = call(q, k, v, mask, **options).contiguous()
        log.paused -= 1
        log.add("itercast.sdpa", (q, k, v), _attention_facts(mask, options), output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        q, k, v = ctx.saved_tensors
        log = ctx.log
        log.paused += 1
        if torch._guards.detect_fake_mode((q,)):
            grads = [torch.empty_like(t) for t in (q, k, v)]
        else:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                call: Any = torch.nn.functional.scaled_dot_product_attention
                output = call(*leaves, ctx.mask, **ctx.options)
                found = torch.autograd.grad(output, leaves, grad)
            grads = [torch.empty_like(t).copy_(g) for t, g in zip(leaves, found, strict=True)]
        log.paused -= 1
        facts = _attention_facts(ctx.mask, ctx.options)
        log.add("itercast.sdpa_backward", (grad, q, k, v), facts, grads)
        return None, None, None, *grads


def _attention_facts(mask: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "is_causal": bool(options.get("is_causal", False)),
        "dropout_p": float(options.get("dropout_p", 0.0)),
        "enable_gqa": bool(options.get("enable_gqa", False)),
        "masked": mask is not None,
    }


def eager_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """scaled_dot_product_attention as models write it out: two products, mask, softmax, dropout."""
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
    weights = torch.softmax(scores, -1)
    return torch.dropout(weights, dropout_p, train=dropout_p > 0) @ value


class KeepAttention(TorchFunctionMode):
    """Keeps scaled_dot_product_attention whole (on CPU it would decompose), or writes it out."""

    def __init__(self, log: Log, eager: bool) -> None:
        super().__init__()
        self.log, self.eager = log, eager

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.nn.functional.scaled_dot_product_attention or self.log.paused:
            return func(*args, **kwargs)
        if self.eager:
            return eager_attention(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        q, k, v = (given.pop(n) for n in names[:3])
        return _LoggedAttention.apply(self.log, given.pop("attn_mask", None), given, q, k, v)
