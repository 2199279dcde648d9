"""How much of attention a block mask of flex_attention leaves, such as a window or documents."""

from __future__ import annotations

import sys
from math import isqrt, sqrt
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

SCORES = 2**22  # at so many a mask is looked at, evenly spaced
SEEN = WeakTensorKeyDictionary()  # shares by the mask's tensor of counts
Sequences = tuple[int, int, int]  # number, samples that they are of, length


def computed_share(mask: Any) -> float | None:
    """The share of its blocks that a block mask computes; None where that depends on data.

    ``mask``: as ``BlockMask.as_tuple`` returns it. Its function is asked, as its counts of blocks
    have no values in a capture. Mean of batch and heads.
    """
    lengths, counts, blocks, function = mask[:2], mask[2], mask[-3:-1], mask[-1]
    if counts not in SEEN:
        batch, heads, _ = counts.shape  # and rows of blocks
        SEEN[counts] = _share(function, batch, heads, lengths, blocks)
    share: float | None = SEEN[counts]
    return share


def _share(function: Any, batch: int, heads: int, lengths: Any, blocks: Any) -> float | None:
    """As ``computed_share``: a block counts if any of the scores that are looked at does."""
    flex: Any = sys.modules["torch.nn.attention.flex_attention"]
    most = max(1, isqrt(SCORES // (batch * heads)))
    steps = [max(1, length // most) for length in lengths]
    with _disable_current_modes():
        samples = (torch.arange(batch), torch.arange(heads))
        places = (torch.arange(0, n, step) for n, step in zip(lengths, steps, strict=True))
        size = [max(1, block // step) for block, step in zip(blocks, steps, strict=True)]
        try:
            kept = flex._vmap_for_bhqkv(function, prefix=())(*samples, *places)
            scores = kept.expand(batch, heads, -1, -1).float()
            computed = torch.nn.functional.max_pool2d(scores, size, ceil_mode=True)
            return float(computed.mean())
        except Exception:  # what a mask asks of tensors without data may raise anything
            return None


def equal_work(share: float, batch: int, length: int, block: int) -> tuple[bool, Sequences | None]:
    """Whether attention that computes this share of its blocks costs what causal attention does,
    and of which other sequences, if not of ``batch`` of this ``length``.

    Documents are shorter sequences; a window is taken as so many of these, of such a length, as
    have as many scores in the blocks that they compute: n sequences of L have n L (L + block) / 2.
    """
    triangle = (length + block) / (2 * length) if length > block else 1.0
    if share > 0.99 * triangle:
        return share <= (1 + triangle) / 2, None
    scores = batch * share * length**2
    alone = max(block, 2 * share * length - block)  # the length that keeps the number of tokens
    count = max(1, round(batch * length / alone))
    other = (sqrt(block**2 + 8 * scores / count) - block) / 2
    return True, (count, batch, max(1, round(other)))
