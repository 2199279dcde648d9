"""The GPT of the first records of https://github.com/KellerJordan/modded-nanogpt."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from itercast.capture.cases.models.transformers import rotate


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
        at = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        turns = torch.arange(self.head_dim, device=tokens.device, dtype=torch.float32)
        angles = at[:, None] * 1e4 ** -(turns % (self.head_dim // 2) * 2 / self.head_dim)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, angles)
        logits: torch.Tensor = self.head(normed(x))
        return logits.float()
