"""A multilayer perceptron, a recurrent language model, a policy with its value function."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

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


class ActorCritic(nn.Module):
    """Policy over discrete actions and value function on one body, as PPO trains them.

    ``shape`` is that of an observation: (channels, height, width) are images and go through the
    three convolutions of Nature DQN (https://doi.org/10.1038/nature14236), (features,) are vectors.
    Layers of ``widths`` follow. In eval mode it acts: it draws an action by its probabilities.
    """

    def __init__(self, shape: tuple[int, ...], widths: tuple[int, ...], actions: int) -> None:
        super().__init__()
        self.images = len(shape) > 1
        body, features = list[nn.Module](), shape[0]
        if self.images:
            side = shape[-1]
            for width, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                body += [nn.Conv2d(features, width, kernel, stride), nn.ReLU()]
                features, side = width, (side - kernel) // stride + 1
            body, features = [*body, nn.Flatten()], features * side**2
        for a, b in pairwise((features, *widths)):
            body += [nn.Linear(a, b), nn.ReLU() if self.images else nn.Tanh()]
        self.body = nn.Sequential(*body)
        self.policy, self.value = nn.Linear(widths[-1], actions), nn.Linear(widths[-1], 1)

    def forward(self, observed: torch.Tensor, **experience: Any) -> tuple[torch.Tensor, ...]:
        """(batch, *shape) to log-probabilities, values, and in eval mode an action each."""
        x = self.body(observed.float() / 255 if self.images else observed)
        log_probs, values = self.policy(x).log_softmax(-1), self.value(x).squeeze(-1)
        if self.training:
            return log_probs, values
        return log_probs, values, torch.multinomial(log_probs.exp(), 1)


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
