"""SASRec (arXiv:1808.09781) and GRU4Rec as https://github.com/RUCAIBox/RecBole has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SasRecLayer(nn.Module):
    """Attention with an added mask and softmax in ops of their own, and an MLP; norms behind."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(batch, items, width) to the same; mask (batch, 1, items, items) is added to scores."""
        parts = (self.q(x), self.k(x), self.v(x))
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5 + mask
        y = torch.matmul(self.dropout(torch.softmax(scores, dim=-1)), v)
        y = self.out(y.transpose(1, 2).contiguous().flatten(2))
        x = self.norm1(self.dropout(y) + x)
        y = self.up(x)
        y = self.down(y * 0.5 * (1.0 + torch.erf(y / 2.0**0.5)))
        return self.norm2(self.dropout(y) + x)


class NextItem(nn.Module):
    """Scores of all items after a history: layers of attention, or without any one of a GRU.

    ``forward`` takes ``last``, the place of the last item of each history, and the loss's labels.
    """

    def __init__(self, width: int, layers: int, heads: int, items: int, seq: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.dropout = nn.Dropout(0.5 if layers else 0.3)
        self.blocks = nn.ModuleList(SasRecLayer(width, heads) for _ in range(layers))
        if layers:
            self.places, self.norm = nn.Embedding(seq, width), nn.LayerNorm(width)
        else:
            self.gru = nn.GRU(width, 2 * width, bias=False, batch_first=True)
            self.dense = nn.Linear(2 * width, width)

    def through(self, tokens: Tensor) -> Tensor:
        """(batch, seq) items to (batch, seq, width)."""
        x = self.items(tokens)
        if not self.blocks:
            return self.dense(self.gru(self.dropout(x))[0])
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.dropout(self.norm(x + self.places(places)))
        length = tokens.shape[1]
        before = torch.ones(length, length, device=tokens.device).tril()
        seen = (tokens > 0)[:, None, None, :] * before
        mask = (1.0 - seen.type_as(x)) * -1e4
        for block in self.blocks:
            x = block(x, mask)
        return x

    def forward(self, tokens: Tensor, last: Tensor, labels: Tensor | None = None) -> Tensor:
        """(batch, seq) items to (batch, items)."""
        x = self.through(tokens)
        ends = last.reshape(-1, 1, 1).expand(-1, -1, x.shape[-1])
        return F.linear(x.gather(1, ends).squeeze(1), self.items.weight)
