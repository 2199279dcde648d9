"""Ops that choose elements by masks, as torch runs them: by the positions that are true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from itercast.capture.opcall import Args, Argument, Kwargs
from itercast.capture.recorder.facts import flatten_lists, is_mask

PUT = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
MASKED = ("index", "_unsafe_index", "masked_select", *PUT)
AT_POSITIONS, FILL = torch.ops.aten.index.Tensor, torch.ops.aten.masked_fill.Tensor


def takes_masks(func: OpOverload, args: Args) -> bool:
    """Whether an op chooses elements by masks."""
    return func._opname in MASKED and any(map(is_mask, flatten_lists(args[1:2])))


def by_position(run: Callable[..., Any], func: OpOverload, args: Args, kwargs: Kwargs) -> Argument:
    """``run`` what torch runs for an op with masks: ``nonzero`` of each, then the op at positions.

    Putting one number at a mask is a ``masked_fill``. Sources: ``expandTensors`` in
    aten/src/ATen/native/IndexingUtils.h, ``canDispatchToMaskedFill`` in TensorAdvancedIndexing.cpp.
    """
    x, chosen, *rest = args
    if func._opname == "masked_select":
        shape = torch.broadcast_shapes(x.shape, chosen.shape)
        x, mask = (run(torch.ops.aten.expand.default, (t, shape), {}) for t in (x, chosen))
        func, chosen = AT_POSITIONS, [mask]
    if func._opname in PUT and len(chosen) == 1 and rest[0].dim() == 0 and not any(rest[1:]):
        mask = chosen[0]
        for _ in range(x.dim() - mask.dim()):
            mask = run(torch.ops.aten.unsqueeze.default, (mask, -1), {})
        fill = torch.ops.aten.masked_fill_.Tensor if func._schema.is_mutable else FILL
        return run(fill, (x, mask, rest[0]), kwargs)
    indices = list[Argument]()
    for index in chosen:
        found = run(torch.ops.aten.nonzero.default, (index,), {}) if is_mask(index) else None
        indices += [index] if found is None else run(torch.ops.aten.unbind.int, (found, 1), {})
    return run(func, (x, indices, *rest), kwargs)
