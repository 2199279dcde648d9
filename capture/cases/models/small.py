"""A multilayer perceptron and a recurrent language model."""

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
        return self.layers[-1](x)


class RecurrentLM(nn.Module):
    """Recurrent language model: embedding, GRU or LSTM layers, linear head.

    On a CPU an LSTM layer is one oneDNN call, a GRU layer many products and elementwise calls.
    """

    def __init__(self, width: int, layers: int, vocab: int, cell: str = "gru") -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        cells = {"gru": nn.GRU, "lstm": nn.LSTM}[cell]
        self.cells = cells(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) integers to (batch, seq, vocab)."""
        states, _ = self.cells(self.tokens(tokens))
        return self.head(states)
