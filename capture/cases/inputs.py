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
    """Random tensors by name; a shape is of numbers and names of sizes: ``[batch, 3, image]``.

    Where a shape ends in ``below NAME`` the numbers are integers from 0 and below this size.
    """
    lengths, tensors = {**sizes, "batch": batch, "seq": seq}, {}
    for name, shape in shapes.items():
        *before, last = shape
        word, _, limit = str(last).partition(" ")
        if word == "below":
            axes = [lengths.get(axis, axis) for axis in before]
            tensors[name] = torch.randint(0, lengths[limit], axes)
        else:
            tensors[name] = torch.randn([lengths.get(axis, axis) for axis in shape])
    return tensors


def vectors(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Random vectors ``x`` of shape (batch, width of the first layer)."""
    return {"x": torch.randn(batch, sizes["widths"][0])}


def token_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross-entropy with the input tokens as labels."""
    labels = inputs["tokens"].reshape(-1)
    return F.cross_entropy(logits.reshape(len(labels), -1), labels)


def mean_square(y: Tensor, inputs: Inputs) -> Tensor:
    """The mean of the output's squares, for models without labels."""
    return y.square().mean()


def label_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross-entropy of class labels."""
    return F.cross_entropy(logits, inputs["labels"])
