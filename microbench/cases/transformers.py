"""Transformers in three styles: GPT, BERT, Llama."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Root-mean-square norm, as models in the wild write it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x / rms(x) * weight."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """Self-attention; Llama style has half as many key-value heads and no biases."""

    def __init__(self, style: str, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.causal = heads, style != "bert"
        self.kv_heads = heads // 2 if style == "llama" else heads
        self.head_dim = width // heads
        bias = style != "llama"
        self.q = nn.Linear(width, width, bias=bias)
        self.kv = nn.Linear(width, 2 * self.kv_heads * self.head_dim, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) to the same."""
        batch, seq, width = x.shape
        q = self.q(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        kv = self.kv(x).view(batch, seq, 2, self.kv_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        grouped = self.kv_heads != self.heads
        y = F.scaled_dot_product_attention(
            q, kv[0], kv[1], is_causal=self.causal, enable_gqa=grouped
        )
        result: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, width))
        return result


class Mlp(nn.Module):
    """GELU four times as wide, or SwiGLU."""

    def __init__(self, style: str, width: int) -> None:
        super().__init__()
        self.gated = style == "llama"
        hidden = width * 8 // 3 if self.gated else 4 * width
        self.up = nn.Linear(width, hidden, bias=not self.gated)
        self.down = nn.Linear(hidden, width, bias=not self.gated)
        self.gate = nn.Linear(width, hidden, bias=False) if self.gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) to the same."""
        y = F.silu(self.gate(x)) * self.up(x) if self.gate else F.gelu(self.up(x))
        result: torch.Tensor = self.down(y)
        return result


class Block(nn.Module):
    """Attention and MLP; BERT norms after, the others before."""

    def __init__(self, style: str, width: int, heads: int) -> None:
        super().__init__()
        norm = RMSNorm if style == "llama" else nn.LayerNorm
        self.post = style == "bert"
        self.attention, self.mlp = Attention(style, width, heads), Mlp(style, width)
        self.norm1, self.norm2 = norm(width), norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) to the same."""
        if self.post:
            x = self.norm1(x + self.attention(x))
            y: torch.Tensor = self.norm2(x + self.mlp(x))
            return y
        x = x + self.attention(self.norm1(x))
        z: torch.Tensor = x + self.mlp(self.norm2(x))
        return z


class Transformer(nn.Module):
    """Tokens to logits; learned positions; head tied to the embedding."""

    def __init__(self, style: str, width: int, layers: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(style, width, heads) for _ in range(layers))
        self.norm = RMSNorm(width) if style == "llama" else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        # At torch's default (std 1) a tied head saturates the softmax, its gradients turn denormal
        # and CPU products run 50 times slower; real models start at 0.02.
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) integers to (batch, seq, vocab)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
