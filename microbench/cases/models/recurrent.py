"""A language model of GRU or LSTM layers."""

from __future__ import annotations

import torch
from torch import nn


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
        logits: torch.Tensor = self.head(states)
        return logits
