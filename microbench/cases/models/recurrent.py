"""A recurrent language model."""

from __future__ import annotations

import torch
from torch import nn


class RecurrentLM(nn.Module):
    """Tokens, layers of GRUs or LSTMs, logits over the tokens.

    A CPU runs an LSTM layer as one oneDNN call, and a GRU as products and elementwise calls.
    """

    def __init__(self, width: int, layers: int, vocab: int, kind: str = "gru") -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        cells = {"gru": nn.GRU, "lstm": nn.LSTM}[kind]
        self.cells = cells(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) integers to (batch, seq, vocab)."""
        states, _ = self.cells(self.tokens(tokens))
        logits: torch.Tensor = self.head(states)
        return logits
