"""What models of cases read, drawn at random, and their losses; ``cases.yaml`` names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from itercast.capture.cases.kinds import Sizes
from itercast.capture.step import Inputs


def drawn(batch: int, seq: int, sizes: Sizes, shapes: Mapping[str, Sequence[Any]]) -> Inputs:
    """Random tensors of shapes of numbers and names of sizes, ``[batch, 3, image, image]``.

    Where a shape ends in ``below NAME`` they are integers from 0 and below this size.
    """
    known, made = {**sizes, "batch": batch, "seq": seq}, {}
    for name, shape in shapes.items():
        *before, last = shape
        word, _, limit = str(last).partition(" ")
        count = [known.get(n, n) for n in (before if word == "below" else shape)]
        integers = word == "below"
        made[name] = torch.randint(0, known[limit], count) if integers else torch.randn(count)
    return made


def vectors(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Vectors as wide as the first layer."""
    return {"x": torch.randn(batch, sizes["widths"][0])}


def token_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross-entropy with the input tokens as labels."""
    labels = inputs["tokens"].reshape(-1)
    return F.cross_entropy(logits.reshape(len(labels), -1), labels)


def mean_square(y: Tensor, inputs: Inputs) -> Tensor:
    """The mean of squares."""
    return y.square().mean()


def label_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross-entropy of class labels."""
    return F.cross_entropy(logits, inputs["labels"])
