"""The decoder of Stanford's CS336 as its course writes it, with separate ops where torch has one.

Source: cs336_basics of https://github.com/stanford-cs336/assignment2-systems.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from itercast.capture.step import Inputs

RATE, DECAY, FIRST, SECOND, TINY = 1e-3, 0.01, 0.9, 0.999, 1e-8  # AdamW's defaults of the course


class Linear(nn.Module):
    """A product without bias, as an einsum over the weight."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, wide) * (2 / (wide + out)) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, wide) to (batch, seq, out)."""
        return torch.einsum("bsi,oi->bso", x, self.weight)


class RmsNorm(nn.Module):
    """x over its root mean square in fp32, times a learned scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, width) to the same."""
        exact = x.to(torch.float32)
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * exact).to(x.dtype)


def softmax(x: Tensor) -> Tensor:
    """Softmax of the last axis in five ops."""
    powers = torch.exp(x - torch.max(x, dim=-1, keepdim=True)[0])
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def written_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross-entropy with the input tokens as labels, from a log-softmax of separate ops."""
    shifted = logits - torch.max(logits, dim=-1, keepdim=True)[0]
    logs = shifted - torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))
    return torch.mean(torch.gather(-logs, -1, inputs["tokens"].unsqueeze(-1)))


class CourseBlock(nn.Module):
    """Causal attention with rotary positions and a gated MLP, each behind a norm."""

    def __init__(self, width: int, heads: int, hidden: int, loop: bool) -> None:
        super().__init__()
        self.heads, self.loop = heads, loop
        self.norm_attention, self.norm_mlp = RmsNorm(width), RmsNorm(width)
        self.q, self.k, self.v, self.out = (Linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = (
            Linear(wide, out) for wide, out in ((width, hidden), (width, hidden), (hidden, width))
        )

    def attention(self, x: Tensor, turns: Tensor) -> Tensor:
        """(batch, seq, width) to the same; turns: cosines and sines (2, seq, head width / 2)."""
        batch, seq, width = x.shape
        parts = (part(x).view(batch, seq, self.heads, -1) for part in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        q, k = turned(q, turns), turned(k, turns)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
        at = torch.arange(seq, device=x.device)
        scores = torch.where(at[:, None] >= at[None, :], scores, float("-inf"))
        y = torch.einsum("bhqk,bhkd->bhqd", softmax(scores), v)
        joined: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, width))
        return joined

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """(batch, seq, width) to the same."""
        x = x + self.attention(self.norm_attention(x), turns)
        y = self.norm_mlp(x)
        gate = self.gate(y)
        x = x + self.down(gate * torch.sigmoid(gate) * self.up(y))
        if self.loop:
            update(self)
        return x


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Pairs of neighbours in the last axis, turned by their positions' angles."""
    cosines, sines = turns.unbind(0)
    one, other = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat((cosines * one - sines * other, sines * one + cosines * other), dim=-1)


class CourseLm(nn.Module):
    """The decoder; with ``loop`` its step contains the course's own AdamW.

    No optimizer of torch is such a loop of separate ops over parameters, so that the forward pass
    runs it (``update``), and the step is timed without an optimizer.
    """

    def __init__(
        self, width: int, layers: int, heads: int, hidden: int, vocab: int, loop: bool
    ) -> None:
        super().__init__()
        self.table, self.norm, self.head = (
            Linear(width, vocab),
            RmsNorm(width),
            Linear(width, vocab),
        )
        blocks = (CourseBlock(width, heads, hidden, loop) for _ in range(layers))
        self.layers = nn.ModuleList(blocks)
        self.pairs, self.loop = width // heads // 2, loop

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, seq) integers to (batch, seq, vocab)."""
        at = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        rates = 1e4 ** -(torch.arange(self.pairs, device=tokens.device) / self.pairs)
        angles = at[:, None] * rates
        turns = torch.stack((torch.cos(angles), torch.sin(angles)))
        x = self.table.weight[tokens, :]
        for layer in self.layers:
            x = layer(x, turns)
        logits: Tensor = self.head(self.norm(x))
        if self.loop:
            update(self.table, self.norm, self.head)
        return logits


@torch.no_grad()
def update(*modules: nn.Module) -> None:
    """AdamW's fourteen ops for each parameter, which stands for its gradient and means, too."""
    for parameter in (p for module in modules for p in module.parameters()):
        number = mean = square = grad = parameter.data
        number -= RATE * DECAY * number
        mean = FIRST * mean + (1 - FIRST) * grad
        square = SECOND * square + (1 - SECOND) * torch.square(grad)
        number -= RATE * mean / (torch.sqrt(square) + TINY)
