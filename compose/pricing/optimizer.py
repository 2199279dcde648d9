"""The optimizer's calls over the parameters of one rank, from those captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from itercast.compose.pricing.priced_op import Priceable
from itercast.microbench.ops.step.optimizer import FUSED, OptimizerOp, as_fused, of_rank

# Tensors like the parameter, in its own dtype, that an optimizer keeps.
STATE_COPIES = {"adamw": 2, "adamw_fused": 2, "lamb": 2, "sgd": 0, "none": 0}


def scaled_update(captured: Sequence[Priceable], numel: int, tensors: int) -> list[Priceable]:
    """Resizes the optimizer's captured calls to a rank's ``numel`` elements and ``tensors``."""
    whole = max((getattr(c.params, "numel", 0) for c in captured), default=0)
    scaled = []
    for c in captured:
        if isinstance(c.params, OptimizerOp):
            scaled.append(replace(c, params=of_rank(c.params, numel, tensors, whole)))
        else:
            share = numel / whole if whole else 1.0
            scaled.append(replace(c, bytes_moved=c.bytes_moved * share))
    return scaled


def fused_update(calls: Sequence[Priceable]) -> list[Priceable]:
    """Replaces the optimizer's calls by one fused kernel: parameters, gradients, state read once.

    Calls of an optimizer that has fused kernels stay as they are.
    """
    large = [c for c in calls if isinstance(c.params, OptimizerOp)]
    if not large or any(c.params.op in FUSED for c in large):
        return list(calls)
    fused = as_fused([c.params for c in large])
    most = max(large, key=lambda c: c.params.numel)
    return [replace(most, op=f"aten.{fused.op}.default", params=fused)]
