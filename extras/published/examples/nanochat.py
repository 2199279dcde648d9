"""The GPT of https://github.com/karpathy/nanochat in early 2026, without windows of attention.

And that of the first records of https://github.com/KellerJordan/modded-nanogpt.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itercast.capture.cases.models.transformers import rotate

GATED = 32  # channels that the gate of a value embedding reads
CAP = 15.0  # of logits


class NanochatBlock(nn.Module):
    """Attention with rotary positions and an MLP with a squared ReLU, each behind a norm.

    Before them the first embedding is mixed in. ``vocab``, where it is not 0: tokens have an
    embedding that is added to the values, by a gate for each head.
    """

    def __init__(self, width: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.kept, self.mixed = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
        if vocab:
            self.values = nn.Embedding(vocab, width)
            self.gate = nn.Linear(GATED, heads, bias=False)
        self.has_values = bool(vocab)

    def attention(self, x: Tensor, tokens: Tensor, angles: Tensor) -> Tensor:
        """(batch, seq, width) to the same; angles (seq, width / heads)."""
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.q, self.k, self.v))
        if self.has_values:
            gate = 2 * torch.sigmoid(self.gate(x[..., :GATED]))
            v = v + gate.unsqueeze(-1) * self.values(tokens).unflatten(-1, (self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        q, k = (normed(rotate(part, angles)).type_as(v) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return joined

    def forward(self, x: Tensor, first: Tensor, tokens: Tensor, angles: Tensor) -> Tensor:
        """(batch, seq, width) to the same."""
        x = self.kept * x + self.mixed * first
        x = x + self.attention(normed(x), tokens, angles)
        x = x + self.down(torch.relu(self.up(normed(x))).square())
        return x


class Nanochat(nn.Module):
    """Decoder whose every other block, the last one too, has value embeddings; capped logits."""

    def __init__(self, width: int, layers: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        tables = [vocab if (layers - 1 - i) % 2 == 0 else 0 for i in range(layers)]
        self.blocks = nn.ModuleList(NanochatBlock(width, heads, table) for table in tables)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head_dim = width // heads

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, seq) integers to (batch, seq, vocab)."""
        angles = angles_of(tokens, self.head_dim)
        x = first = normed(self.tokens(tokens))
        for block in self.blocks:
            x = block(x, first, tokens, angles)
        logits: Tensor = self.head(normed(x))
        return CAP * torch.tanh(logits.float() / CAP)


def angles_of(tokens: Tensor, head_dim: int) -> Tensor:
    """Angles of rotary positions, (seq, head_dim), for tokens of (batch, seq)."""
    at = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
    turns = torch.arange(head_dim, device=tokens.device, dtype=torch.float32)
    return at[:, None] * 1e4 ** -(turns % (head_dim // 2) * 2 / head_dim)


def normed(x: torch.Tensor) -> torch.Tensor:
    """x over its root mean square; nothing is learned."""
    return F.rms_norm(x, (x.shape[-1],))


class SpeedrunBlock(nn.Module):
    """Attention with rotary positions and an MLP, both without biases, each behind a norm.

    ``modern``: queries and keys are normed, and the MLP squares a ReLU instead of a GELU.
    """

    def __init__(self, width: int, heads: int, modern: bool) -> None:
        super().__init__()
        self.heads, self.modern = heads, modern
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) to the same; angles (seq, width / heads)."""
        batch, seq, width = x.shape
        shape = (batch, seq, 3, self.heads, -1)
        q, k, v = self.qkv(normed(x)).view(shape).permute(2, 0, 3, 1, 4)
        if self.modern:
            q, k = normed(q), normed(k)
        q, k = (rotate(part, angles).type_as(v) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, width))
        y = self.up(normed(x))
        x = x + self.down(torch.relu(y).square() if self.modern else F.gelu(y))
        return x


class SpeedrunGpt(nn.Module):
    """Decoder with one table for tokens and the head, and logits in fp32."""

    def __init__(self, width: int, layers: int, heads: int, vocab: int, modern: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(SpeedrunBlock(width, heads, modern) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.head_dim = width // heads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) integers to (batch, seq, vocab)."""
        angles = angles_of(tokens, self.head_dim)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, angles)
        logits: torch.Tensor = self.head(normed(x))
        return logits.float()
