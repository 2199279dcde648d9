"""Transformers in the styles of GPT, BERT, Llama and ViT."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Root-mean-square norm written in separate ops, as in Hugging Face models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x / rms(x) * weight."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate (batch, heads, seq, head_dim) by rotary position ``angles``, as in Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class Attention(nn.Module):
    """Self-attention; Llama style has no biases and by default half as many key-value heads."""

    def __init__(
        self, style: str, width: int, heads: int, kv_heads: int = 0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, style in ("gpt", "llama"), dropout
        self.kv_heads = kv_heads or (heads // 2 if style == "llama" else heads)
        self.head_dim = width // heads
        bias = style != "llama"
        self.q = nn.Linear(width, width, bias=bias)
        self.kv = nn.Linear(width, 2 * self.kv_heads * self.head_dim, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, seq, width) to the same."""
        batch, seq, _ = x.shape
        q = self.q(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        kv = self.kv(x).view(batch, seq, 2, self.kv_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        k, v = kv[0], kv[1]
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        grouped, dropped = self.kv_heads != self.heads, self.dropout * self.training
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=grouped, dropout_p=dropped
        )
        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))


class Mlp(nn.Module):
    """Feed-forward network: GELU with four times the width, or SwiGLU in Llama style."""

    def __init__(self, style: str, width: int, hidden: int = 0) -> None:
        super().__init__()
        self.gated = style == "llama"
        hidden = hidden or (width * 8 // 3 if self.gated else 4 * width)
        self.up = nn.Linear(width, hidden, bias=not self.gated)
        self.down = nn.Linear(hidden, width, bias=not self.gated)
        self.gate = nn.Linear(width, hidden, bias=False) if self.gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) to the same."""
        y = F.silu(self.gate(x)) * self.up(x) if self.gate else F.gelu(self.up(x))
        return self.down(y)


class Experts(nn.Module):
    """Mixture of experts by expert choice: each takes its ``tokens * top / experts`` best tokens.

    Balanced by construction, so that no shape depends on data (arXiv:2202.09368).
    """

    def __init__(
        self, width: int, hidden: int, experts: int, top: int, gated: bool = False
    ) -> None:
        super().__init__()
        self.experts, self.top, self.gated = experts, top, gated
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.gate = nn.Parameter(torch.empty(experts, width, hidden)) if gated else None
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        for weight in (self.up, self.gate, self.down):
            if weight is not None:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) to the same; tokens that no expert takes become zero."""
        flat = x.reshape(-1, x.shape[-1])
        capacity = max(1, len(flat) * self.top // self.experts)
        scores = F.softmax(self.router(flat), dim=-1).t()
        best, chosen = scores.topk(capacity, dim=1)
        index = chosen.reshape(-1)
        taken = flat.index_select(0, index).view(self.experts, capacity, -1)
        hidden = torch.bmm(taken, self.up)
        if self.gate is not None:
            hidden = F.silu(torch.bmm(taken, self.gate)) * hidden
        else:
            hidden = F.gelu(hidden)
        y = torch.bmm(hidden, self.down) * best.unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, index, y.view(-1, x.shape[-1])).view_as(x)


class Block(nn.Module):
    """Transformer block: attention, then an MLP or experts; post-norm in BERT style."""

    def __init__(
        self,
        style: str,
        width: int,
        heads: int,
        kv_heads: int = 0,
        hidden: int = 0,
        experts: int = 0,
        top: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        norm = RMSNorm if style == "llama" else nn.LayerNorm
        self.post = style == "bert"
        self.attention = Attention(style, width, heads, kv_heads, dropout)
        self.dropout = nn.Dropout(dropout) if dropout else lambda x: x  # no call of a module
        if experts:
            self.mlp: nn.Module = Experts(
                width, hidden or 4 * width, experts, top, style == "llama"
            )
        else:
            self.mlp = Mlp(style, width, hidden)
        self.norm1, self.norm2 = norm(width), norm(width)

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, seq, width) to the same."""
        if self.post:
            x = self.norm1(x + self.dropout(self.attention(x, angles)))
            return self.norm2(x + self.dropout(self.mlp(x)))
        x = x + self.dropout(self.attention(self.norm1(x), angles))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Language model; its head is tied to the embedding unless ``tied`` is false.

    Positions are learned, up to ``positions``; 0: rotary. Other options are those of ``Block``.
    """

    def __init__(
        self,
        style: str,
        width: int,
        layers: int,
        heads: int,
        vocab: int,
        *,
        tied: bool = True,
        positions: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(positions, width) if positions else None
        self.blocks = nn.ModuleList(Block(style, width, heads, **options) for _ in range(layers))
        self.norm = RMSNorm(width) if style == "llama" else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        # At torch's default (std 1) a tied head saturates the softmax, its gradients turn denormal
        # and CPU products run 50 times slower; real models start at 0.02.
        nn.init.normal_(self.tokens.weight, std=0.02)
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)

    def enter(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed tokens: (batch, seq) integers to the blocks' input."""
        x: torch.Tensor = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return x

    def through(self, x: torch.Tensor, blocks: Iterable[nn.Module]) -> torch.Tensor:
        """Run some of the blocks, with rotary positions in Llama style."""
        angles = None
        if self.positions is None:
            position = torch.arange(x.shape[1], device=x.device)
            exponents = torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim
            angles = torch.outer(position, 10000.0**-exponents).repeat(1, 2).to(x.dtype)
        for block in blocks:
            x = block(x, angles)
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the norm and head: the blocks' output to (batch, seq, vocab)."""
        return self.head(self.norm(x))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) integers to (batch, seq, vocab)."""
        return self.leave(self.through(self.enter(tokens), self.blocks))


class MaskedLM(nn.Module):
    """BERT with its masked-language-model head (arXiv:1810.04805)."""

    def __init__(self, width: int, layers: int, heads: int, vocab: int, positions: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(positions, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block("bert", width, heads) for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocab)
        self.head.weight = self.tokens.weight
        for table in (self.tokens, self.positions, self.segments):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) integers to (batch, seq, vocab)."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        segment = torch.zeros_like(tokens)
        x = self.norm(self.tokens(tokens) + self.positions(position) + self.segments(segment))
        for block in self.blocks:
            x = block(x)
        return self.head(self.transform(x))
