"""A recurrent language model."""

from __future__ import annotations

import torch
from torch import nn


class RecurrentLM(nn.Module):
    """Tokens, a stack of GRU cells run step by step, logits over the tokens.

    Cells in a loop: nn.GRU is one call that every device decomposes in its own way.
    """

    def __init__(self, width: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.cells = nn.ModuleList(nn.GRUCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) integers to (batch, seq, vocab)."""
        steps = self.tokens(tokens).unbind(1)
        for cell in self.cells:
            state, states = torch.zeros_like(steps[0]), []
            for x in steps:
                state = cell(x, state)
                states.append(state)
            steps = tuple(states)
        logits: torch.Tensor = self.head(torch.stack(steps, dim=1))
        return logits
