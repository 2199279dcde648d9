"""Attention of distributed tensors, which a program hands to DTensor's own dispatcher.

Heads that are cut stay where they are. Where the sequence is cut (``context_parallel``), torch runs
ring attention: each block of keys and values is one call on what a rank holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from itercast.microbench.capture.log import OpLog, WholeAttention

FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
FLASH_OPS = (FLASH, FLASH_BACKWARD)


class ShardedAttention(WholeAttention):
    """Logs attention as one op; that of distributed tensors as CUDA's flash attention."""

    def __init__(self, log: OpLog) -> None:
        super().__init__(log, eager=False)

    def attend(self, mask: Any, options: dict[str, Any], q: Any, k: Any, v: Any) -> Any:
        """Attention of queries, keys and values."""
        if not is_traceable_wrapper_subclass(q):
            return super().attend(mask, options, q, k, v)
        dropout_p = float(options.get("dropout_p", 0.0))
        return FLASH(q, k, v, dropout_p, bool(options.get("is_causal", False)))[0]


def log_flash(log: OpLog, func: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Log a call of flash attention as attention by any other kernel is logged."""
    names = [a.name for a in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    grouped = given["query"].shape[1] != given["key"].shape[1]
    options = {"is_causal": bool(given.get("is_causal", False)), "enable_gqa": grouped}
    options |= {"dropout_p": float(given.get("dropout_p", 0.0)), "masked": False}
    read = tuple(given[name] for name in ("query", "key", "value"))
    if func is FLASH:
        log.add("itercast.sdpa", read, options, output[0])
    else:
        log.add("itercast.sdpa_backward", (given["grad_out"], *read), options, list(output[:3]))
