"""What recommenders of ``recommender_cases.yaml`` read, drawn at random, and their losses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from itercast.capture.cases.kinds import Sizes
from itercast.capture.step import Inputs


def clicks(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """``bag`` lookups per sample and table; ``rows`` is a number for all tables or one for each."""
    tables, rows, lookups = sizes["tables"], sizes["rows"], batch * sizes["bag"]
    dense = torch.randn(batch, sizes["features"])
    if isinstance(rows, int):
        indices = torch.randint(0, rows, (tables, lookups))
    else:
        indices = torch.stack([torch.randint(0, n, (lookups,)) for n in rows])
    return {
        "dense": dense,
        "indices": indices,
        "offsets": torch.arange(0, lookups, sizes["bag"]),
        "clicked": torch.randint(0, 2, (batch,)).to(torch.get_default_dtype()),
    }


def click_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Binary cross-entropy of clicks."""
    return F.binary_cross_entropy_with_logits(logits, inputs["clicked"])


def rankings(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """``pooling`` lookups per sample and table, by default one."""
    rows = sizes["rows"]
    pairs = list(zip(rows, sizes.get("pooling", (1,) * len(rows)), strict=True))
    return {
        "dense": torch.randn(batch, sizes["features"]),
        "indices": torch.cat([torch.randint(0, n, (batch * k,)) for n, k in pairs]),
        "offsets": torch.stack([torch.arange(0, batch * k, k) for _, k in pairs]),
    }


def ranking_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """A click where the first dense feature is positive."""
    clicked = (inputs["dense"][:, 0] > 0).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, clicked)


def own_item_loss(scores: Tensor, inputs: Inputs) -> Tensor:
    """Users took their own item: the others of the batch are the wrong ones."""
    own = torch.arange(len(scores), device=scores.device)
    return F.cross_entropy(scores, own)


def histories(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Histories of items, and candidates for each next one, the right one first."""
    candidates = (batch, seq, 1 + sizes["negatives"])
    return {
        "history": torch.randint(0, sizes["items"], (batch, seq)),
        "candidates": torch.randint(0, sizes["items"], candidates),
    }


def first_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross-entropy, the first candidate being the right one."""
    first = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits, first)
