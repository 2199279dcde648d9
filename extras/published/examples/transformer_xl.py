"""Transformer-XL: a language model that also attends to the states of the previous segment."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from itercast.capture.cases.inputs import token_loss
from itercast.capture.step import Inputs


class Layer(nn.Module):
    """Post-norm transformer layer with relative attention and a ReLU feed-forward network."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, dropped: float) -> None:
        super().__init__()
        self.heads, self.dropout, self.dropped = heads, dropout, dropped
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.far = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor,
        distances: torch.Tensor,
        biases: tuple[torch.Tensor, torch.Tensor],
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """(seq, batch, width) to the same; memory (past, batch, width).

        ``distances`` (past + seq, 1, width); ``hidden`` (seq, past + seq) masks later tokens.
        """
        seq, batch, width = x.shape
        q, k, v = self.qkv(torch.cat((memory, x))).chunk(3, dim=-1)
        q = q[-seq:].view(seq, batch, self.heads, -1)
        k, v = (t.view(len(t), batch, self.heads, -1) for t in (k, v))
        far = self.far(distances).view(len(distances), self.heads, -1)
        content = torch.einsum("ibnd,jbnd->bnij", q + biases[0], k)
        scores = content + by_distance(torch.einsum("ibnd,jnd->bnij", q + biases[1], far))
        scores = (scores * q.shape[-1] ** -0.5).masked_fill_(hidden, -torch.inf)
        weights = self._drop(scores.softmax(-1), self.dropped)
        y = torch.einsum("bnij,jbnd->ibnd", weights, v).reshape(seq, batch, width)
        x = self.norm1(x + self._drop(self.out(y), self.dropout))
        y = self._drop(torch.relu_(self.up(x)), self.dropout)
        return self.norm2(x + self._drop(self.down(y), self.dropout))

    def _drop(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        return F.dropout(x, rate, self.training) if rate else x


def by_distance(scores: torch.Tensor) -> torch.Tensor:
    """Turn scores by relative distance into scores by key: out[i, j] = scores[i, j + seq - 1 - i].

    Input and result: (batch, heads, seq, past + seq). Entries of keys after query i are meaningless
    and masked by the caller. Source: arXiv:1901.02860, appendix B.
    """
    batch, heads, seq, places = scores.shape
    padded = torch.cat((scores.new_zeros(batch, heads, seq, 1), scores), dim=3)
    return padded.view(batch, heads, places + 1, seq)[:, :, 1:].reshape(scores.shape)


class TransformerXL(nn.Module):
    """Transformer-XL (arXiv:1901.02860) with a tied softmax over all words.

    Tensors are (seq, batch, ...). ``dropped`` is the dropout rate of attention weights.
    """

    frequencies: torch.Tensor

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        hidden: int,
        vocab: int,
        dropout: float = 0.1,
        dropped: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.tokens = nn.Embedding(vocab, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(vocab))
        sizes = (width, heads, hidden, dropout, dropped)
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(layers))
        self.near = nn.Parameter(torch.zeros(heads, width // heads))
        self.far = nn.Parameter(torch.zeros(heads, width // heads))
        steps = torch.arange(0, width, 2) / width
        self.register_buffer("frequencies", 10000.0**-steps, persistent=False)

    def forward(
        self, tokens: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(seq, batch) words and (layers, past, batch, width) earlier states.

        Logits (seq * batch, vocab), and the next segment's memory.
        """
        seq, past = len(tokens), memory.shape[1]
        x = self.tokens(tokens) * self.tokens.embedding_dim**0.5
        x = F.dropout(x, self.dropout, self.training)
        place = torch.arange(past + seq - 1, -1, -1, device=x.device, dtype=x.dtype)
        angles = torch.outer(place, self.frequencies.to(x.dtype))
        distances = torch.cat((angles.sin(), angles.cos()), dim=-1)[:, None]
        distances = F.dropout(distances, self.dropout, self.training)
        ahead = x.new_ones(seq, past + seq).triu(1 + past).bool()
        states = []
        for number, layer in enumerate(self.layers):
            states.append(x.detach())
            x = layer(x, memory[number], distances, (self.near, self.far), ahead)
        x = F.dropout(x, self.dropout, self.training)
        logits = F.linear(x.flatten(0, 1), self.tokens.weight, self.bias)
        return logits, torch.stack(states)


def first_token_loss(output: tuple[torch.Tensor, torch.Tensor], inputs: Inputs) -> torch.Tensor:
    """``token_loss`` of the first output."""
    return token_loss(output[0], inputs)
