"""A recurrent language model."""

from __future__ import annotations

import torch
from torch import nn


class RecurrentLM(nn.Module):
    """Tokens, GRU layers, logits over the tokens.

    A GRU, because a CPU's LSTM is one oneDNN call whose workspace has another shape in a capture
    than in a run; a GRU decomposes into the same products and elementwise calls in both.
    """

    def __init__(self, width: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.cells = nn.GRU(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) integers to (batch, seq, vocab)."""
        states, _ = self.cells(self.tokens(tokens))
        logits: torch.Tensor = self.head(states)
        return logits
