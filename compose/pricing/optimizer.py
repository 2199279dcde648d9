"""The optimizer over as much as a rank has, from the captured calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compose.pricing.price_book import Priceable

STATE_COPIES = {"adamw": 2, "sgd": 0, "none": 0}  # tensors like the parameter, in its own dtype


def scaled_update(captured: Sequence[Priceable], numel: int, tensors: int) -> list[Priceable]:
    """The optimizer's calls over as many elements and tensors as a rank has."""
    whole = max((getattr(c.params, "numel", 0) for c in captured), default=0)
    found = []
    for c in captured:
        if c.family is not None and c.family.name == "optimizer":
            per_tensor = c.params.numel <= 4 * c.params.tensors and c.params.numel < whole
            size = tensors if per_tensor else numel
            params = replace(c.params, numel=max(tensors, size), tensors=tensors)
            found.append(replace(c, params=params))
        else:
            share = numel / whole if whole else 1.0
            found.append(replace(c, bytes_moved=c.bytes_moved * share))
    return found


def fused_update(calls: Sequence[Priceable]) -> list[Priceable]:
    """One pass over parameters, gradients and state in place of one per operation."""
    large = [c for c in calls if c.family is not None and c.family.name == "optimizer"]
    if not large:
        return list(calls)
    most = max(large, key=lambda c: c.params.numel)
    op = "_fused_adamw_" if len(large) > 3 else "_fused_sgd_"
    return [replace(most, op=f"aten.{op}.default", params=replace(most.params, op=op))]
