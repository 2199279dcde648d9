"""Models of a user's history: two towers with attention, and HSTU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from itercast.capture.cases.models.small import Perceptron


class TwoTower(nn.Module):
    """Scores of users and items in a batch, from one tower each.

    The user's tower: a vector of the user, and the history's item vectors under self-attention,
    averaged. The item's tower shares the table of items.
    """

    def __init__(
        self, users: int, items: int, width: int, heads: int, hidden: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.heads = heads
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.user_tower = Perceptron((2 * width, *hidden, width))
        self.item_tower = Perceptron((width, *hidden, width))

    def forward(
        self, user: torch.Tensor, history: torch.Tensor, item: torch.Tensor
    ) -> torch.Tensor:
        """(batch,), (batch, seq), (batch,) to scores (batch, batch) of users and items."""
        batch, seq = history.shape
        x = self.items(history)
        parts = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind())
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, -1))
        read = torch.cat((self.users(user), x.mean(dim=1)), dim=1)
        users, items = self.user_tower(read), self.item_tower(self.items(item))
        return F.normalize(users, dim=1) @ F.normalize(items, dim=1).T


class HstuLayer(nn.Module):
    """A layer of HSTU (arXiv:2402.17152): attention by SiLU in place of softmax, with a gate.

    ``width`` of the sequence, ``head`` of queries, keys, values and gates of each of ``heads``.
    """

    def __init__(self, width: int, heads: int, head: int, seq: int) -> None:
        super().__init__()
        self.heads, self.head, inner = heads, head, heads * head
        self.norm, self.normed = nn.LayerNorm(width), nn.LayerNorm(inner)
        self.uvqk, self.out = nn.Linear(width, 4 * inner, bias=False), nn.Linear(inner, width)
        self.bias = nn.Parameter(torch.zeros(2 * seq - 1))  # by distance

    def forward(
        self, x: torch.Tensor, distance: torch.Tensor, causal: torch.Tensor
    ) -> torch.Tensor:
        """(batch, seq, width), with (seq, seq) distances and the mask of the past."""
        batch, seq, _ = x.shape
        gate, v, q, k = F.silu(self.uvqk(self.norm(x))).chunk(4, dim=-1)
        v, q, k = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in (v, q, k))
        scores = F.silu(q @ k.transpose(2, 3) + self.bias[distance]) / seq
        attended = (scores * causal) @ v
        together = attended.transpose(1, 2).reshape(batch, seq, -1)
        return x + self.out(self.normed(together) * gate)


class Hstu(nn.Module):
    """Next items by HSTU layers, against ``negatives`` drawn for each position.

    As generative-recommenders trains it: vectors of items and their neighbours are normalised, the
    softmax is over the next item and the negatives.
    """

    distance: torch.Tensor
    causal: torch.Tensor

    def __init__(
        self, items: int, width: int, layers: int, heads: int, head: int, seq: int
    ) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.positions = nn.Parameter(torch.zeros(seq, width))
        self.layers = nn.ModuleList(HstuLayer(width, heads, head, seq) for _ in range(layers))
        at = torch.arange(seq)
        self.register_buffer("distance", at[:, None] - at + seq - 1, persistent=False)
        self.register_buffer("causal", torch.ones(seq, seq).tril(), persistent=False)

    def forward(self, history: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """(batch, seq), (batch, seq, 1 + negatives) to logits (batch * seq, 1 + negatives)."""
        x = self.items(history) + self.positions
        for layer in self.layers:
            x = layer(x, self.distance, self.causal)
        x = F.normalize(x, dim=-1).flatten(0, 1).unsqueeze(2)
        vectors = F.normalize(self.items(candidates), dim=-1).flatten(0, 1)
        return (vectors @ x).squeeze(2)
