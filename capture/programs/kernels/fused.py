"""Attention in fused kernels of CUDA, which distributed tensors and selective checkpoints see."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from itercast.capture.collectives import by_name
from itercast.capture.programs.kernels.packed import attend_nested
from itercast.capture.recorder.attention import WholeAttention, by_kernel, kernel_left
from itercast.capture.recorder.log import OpLog

FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
# Values may be narrower or wider than keys.
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
FUSED_ATTENTION = (FLASH, FLASH_BACKWARD, EFFICIENT, EFFICIENT_BACKWARD)
SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


class ShardedAttention(WholeAttention):
    """Logs attention as one op, but runs CUDA's fused op where others have to see it dispatched.

    Distributed tensors shard that op, and selective checkpoints may save its result.
    """

    def __init__(self, log: OpLog) -> None:
        super().__init__(log, eager=False)

    def attend(self, mask: Any, options: dict[str, Any], *qkv: Any) -> Any:
        """Attention of queries, keys and values of shape (batch, heads, length, width).

        Logged whole, or by a fused op of CUDA's, which selective checkpoints and DTensor dispatch.
        """
        modes = _get_current_dispatch_mode_stack()
        checkpointed = mask is None and any(isinstance(mode, SELECTIVE) for mode in modes)
        if not checkpointed and not is_traceable_wrapper_subclass(qkv[0]):
            return super().attend(mask, options, *qkv)
        if isinstance(qkv[0], NestedTensor):
            return attend_nested(partial(super().attend, mask, options), *qkv)
        dropout_p = float(options.get("dropout_p", 0.0))
        causal = bool(options.get("is_causal", False))
        if qkv[0].shape[-1] != qkv[2].shape[-1]:
            return EFFICIENT(*qkv, None, True, dropout_p, causal)[0]
        return FLASH(*qkv, dropout_p, causal)[0]


def log_attention(log: OpLog, func: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Log a call of one of ``FUSED_ATTENTION`` as op ``itercast.sdpa`` or its backward."""
    arguments = by_name(func, args, kwargs)
    grouped = arguments["query"].shape[1] != arguments["key"].shape[1]
    options = {"is_causal": bool(arguments.get("is_causal", False)), "enable_gqa": grouped}
    options |= {"dropout_p": float(arguments.get("dropout_p", 0.0)), "masked": False}
    options |= by_kernel(kernel_left(masked=False))
    qkv = tuple(arguments[name] for name in ("query", "key", "value"))
    if func in (FLASH, EFFICIENT):
        log.add("itercast.sdpa", qkv, options, output[0])
    else:
        log.add("itercast.sdpa_backward", (args[0], *qkv), options, list(output[:3]))
