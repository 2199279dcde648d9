"""A multilayer perceptron."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class Perceptron(nn.Module):
    """Multilayer perceptron: linear layers with ReLU between them."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, widths[0]) to (batch, widths[-1])."""
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        result: torch.Tensor = self.layers[-1](x)
        return result
