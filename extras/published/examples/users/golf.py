"""The GPT of the baseline of https://github.com/openai/parameter-golf."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itercast.capture.cases.models.transformers import rotate
from itercast.extras.published.examples.nanochat import angles_of, normed

CAP = 30.0  # of logits


class GolfBlock(nn.Module):
    """Grouped attention and an MLP with a squared ReLU, scaled, behind norms without weights.

    Before them the first embedding is mixed in.
    """

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, part = heads, kv_heads, width // heads * kv_heads
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, part, bias=False) for _ in range(2))
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.gain = nn.Parameter(torch.ones(heads))
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.mixes = nn.ParameterList(torch.ones(width) for _ in range(2))

    def attention(self, x: Tensor, angles: Tensor) -> Tensor:
        """(batch, seq, width) to the same; angles (seq, width / heads)."""
        counted = ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        q, k, v = (part(x).unflatten(-1, (n, -1)).transpose(1, 2) for part, n in counted)
        q, k = (rotate(normed(part), angles).type_as(v) for part in (q, k))
        q = q * self.gain.type_as(q).reshape(1, -1, 1, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, first: Tensor, angles: Tensor) -> Tensor:
        """(batch, seq, width) to the same."""
        kept, mixed = (part.type_as(x) for part in self.mixes)
        of_attention, of_mlp = (part.type_as(x) for part in self.scales)
        x = kept * x + mixed * first
        x = x + of_attention * self.attention(normed(x), angles)
        return x + of_mlp * self.down(torch.relu(self.up(normed(x))).square())


class GolfGpt(nn.Module):
    """Decoder whose second half takes the outputs of the first half in reverse order."""

    def __init__(self, width: int, layers: int, heads: int, kv_heads: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(GolfBlock(width, heads, kv_heads) for _ in range(layers))
        self.skips = nn.ParameterList(torch.ones(width) for _ in range(layers // 2))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.head_dim = width // heads

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, seq) integers to (batch, seq, vocab)."""
        angles = angles_of(tokens, self.head_dim)
        x = first = normed(self.tokens(tokens))
        kept: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            if number < len(self.skips):
                x = block(x, first, angles)
                kept.append(x)
                continue
            if kept:
                x = x + self.skips[number - len(self.skips)].type_as(x) * kept.pop()
            x = block(x, first, angles)
        logits = CAP * torch.tanh(self.head(normed(x)) / CAP)
        return logits.float()
