"""Attention in captures: SDPA as one op or as separate eager ops, FlexAttention as SDPA."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import StackSummary, extract_stack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from itercast.capture.opcall import Args, Argument, Kwargs
from itercast.capture.recorder.replaced.block_masks import Sequences, computed_share, equal_work

SDPA = torch.nn.functional.scaled_dot_product_attention  # context parallelism replaces it
EAGER = "eager"
CAUSAL = "masks of flex_attention that depend on data are taken to be causal, which may be longer"
OTHER_LENGTHS = ContextVar[Sequences | None]("sequences that cost as much as what is masked")
MULTI_HEAD = torch.nn.functional.multi_head_attention_forward


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


def kernel_left(masked: bool) -> str:
    """The one attention kernel that the program left switched on; "" if several could run.

    ``sdpa_kernel`` and ``torch.backends.cuda.enable_cudnn_sdp`` switch kernels; flash takes no
    mask. ``EAGER`` is torch's computation by separate ops.
    """
    on = torch.backends.cuda
    efficient, flash = on.mem_efficient_sdp_enabled(), on.flash_sdp_enabled() and not masked
    if on.cudnn_sdp_enabled():
        return "" if flash or efficient else "cudnn"
    return "flash-2" if flash else "memory-efficient" if efficient else EAGER


@contextmanager
def attention_as(attn: str) -> Iterator[None]:
    """Replace scaled_dot_product_attention inside the context if ``attn`` is "eager"."""
    functional, original = torch.nn.functional, torch.nn.functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = eager_attention if attn == "eager" else original
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


@contextmanager
def flex_as_sdpa(guesses: dict[str, StackSummary]) -> Iterator[None]:
    """Replace flex_attention by scaled_dot_product_attention inside the context.

    A mask costs by the blocks that it computes, or as a causal one (noted in ``guesses``) where
    these depend on data; changes to scores cost nothing.
    """
    flex: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None:
        yield
        return

    def attention(
        q: Tensor, k: Tensor, v: Tensor, score: object, mask: Args, scale: float, *rest: Argument
    ) -> Argument:
        """As torch's op of flex_attention: the output, log-sum-exp and largest scores of rows."""
        causal, sequences = mask[-1] is not flex.noop_mask, None
        share = computed_share(mask) if causal and q.shape[-2] == k.shape[-2] else None
        if share is not None:
            causal, sequences = equal_work(share, q.shape[0], q.shape[-2], mask[-3])
        elif causal:
            guesses.setdefault(CAUSAL, extract_stack())
        before = OTHER_LENGTHS.set(sequences)
        output = torch.nn.functional.scaled_dot_product_attention(
            *(q, k, v),
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        OTHER_LENGTHS.reset(before)
        return output, q.new_empty(q.shape[:-1]), q.new_empty(q.shape[:-1])

    changed: Kwargs = {"flex_attention_hop": attention}
    changed["_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"] = True
    changed["_validate_device"] = lambda *tensors: None  # it has no backward on CPUs
    with patch.multiple(flex, **changed):
        yield


class _LoggedAttention(torch.autograd.Function):
    """Scaled dot-product attention logged as one op forward and one op backward.

    The output is stored as (batch, length, heads, dim), like that of fused kernels.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, log: Any, mask: Tensor | None, options: Kwargs, q: Tensor, k: Tensor, v: Tensor
    ) -> Argument:
        """Attention of (batch, heads, length, dim) tensors; fake ones are not computed."""
        ctx.log, ctx.mask, ctx.options = log, mask, options
        ctx.logged = _attention_options(mask, options)  # backward runs the kernel that forward ran
        ctx.save_for_backward(q, k, v)
        log.paused += 1
        if torch._guards.detect_fake_mode((q,)):
            output = q.new_empty(*q.shape[:-1], v.shape[-1])
        else:
            output = SDPA(q, k, v, mask, **options)
        if q.dim() == 4:
            output = output.transpose(1, 2).contiguous().transpose(1, 2)  # as kernels store it
        log.paused -= 1
        log.add("itercast.sdpa", (q, k, v), ctx.logged, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Argument:  # type: ignore[override]
        """The gradients of queries, keys and values."""
        (q, k, v), log = ctx.saved_tensors, ctx.log
        log.paused += 1
        if torch._guards.detect_fake_mode((q,)):
            grads = [torch.empty_like(t) for t in (q, k, v)]
        else:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                output = SDPA(leaves[0], leaves[1], leaves[2], ctx.mask, **ctx.options)
                computed = torch.autograd.grad(output, leaves, grad)
            grads = [torch.empty_like(t).copy_(g) for t, g in zip(leaves, computed, strict=True)]
        log.paused -= 1
        log.add("itercast.sdpa_backward", (grad, q, k, v), ctx.logged, grads)
        return None, None, None, *grads


def _attention_options(mask: Tensor | None, options: Kwargs) -> Kwargs:
    """The options of an attention call that decide its time, with the kernel if that is known."""
    return {
        "is_causal": bool(options.get("is_causal", False)),
        "dropout_p": float(options.get("dropout_p", 0.0)),
        "enable_gqa": bool(options.get("enable_gqa", False)),
        "masked": mask is not None,
        **({"sequences": sequences} if (sequences := OTHER_LENGTHS.get(None)) else {}),
        **by_kernel(kernel_left(mask is not None)),
    }


def by_kernel(name: str) -> Kwargs:
    """The options of attention by a kernel of this name, where there is one."""
    return {"kernel": name} if name else {}


class WholeAttention(TorchFunctionMode):
    """Logs scaled_dot_product_attention as one op, where a CPU would run several.

    ``eager``: as products, mask and softmax of their own instead, as models without SDPA run them.
    """

    def __init__(self, log: Any, eager: bool) -> None:
        super().__init__()
        self.log, self.eager = log, eager

    def __torch_function__(
        self,
        func: Callable[..., Argument],
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Argument:
        """Log attention whole, also inside ``multi_head_attention_forward``, which calls it."""
        kwargs = kwargs or {}
        if (func is not SDPA and func is not MULTI_HEAD) or self.log.paused:
            return func(*args, **kwargs)
        if func is SDPA:
            return self.replaced(*args, **kwargs)
        with patch.object(torch.nn.functional, SDPA.__name__, self.replaced):
            return func(*args, **kwargs)  # what it calls does not come here

    def replaced(self, *args: Argument, **kwargs: Argument) -> Argument:
        """Run this in place of scaled_dot_product_attention, with the same arguments."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        options = dict(zip(names, args, strict=False)) | kwargs
        mask, *qkv = (options.pop(n, None) for n in ("attn_mask", *names[:3]))
        if self.eager or kernel_left(mask is not None) == EAGER:
            q, k, v = qkv
            return eager_attention(q, k, v, mask, **options)
        return self.attend(mask, options, *qkv)

    def attend(self, mask: Any, options: Kwargs, *qkv: Tensor) -> Argument:
        """Attention of queries, keys and values."""
        return _LoggedAttention.apply(self.log, mask, options, *qkv)
