"""U-Net that removes noise from images (arXiv:2105.05233), also by a text (arXiv:2112.10752)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itercast.capture.step import Inputs
from itercast.extras.kinds.denoiser import TimedBlock
from itercast.extras.published.examples.users.dit import waves

GROUPS = 32  # of channels, in each norm


class Attended(nn.Module):
    """Attention of ``x`` to itself, or to a context of another width; no biases but of ``out``."""

    def __init__(self, width: int, context: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=bias)
        self.k, self.v = (nn.Linear(context or width, width, bias=bias) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """(batch, tokens, width) to the same."""
        read = x if context is None else context
        parts = (self.q(x), self.k(read), self.v(read))
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class AttentionPart(nn.Module):
    """Pixels attend to each other; with a ``context`` in a block that also attends to that."""

    def __init__(self, width: int, head_width: int, context: int) -> None:
        super().__init__()
        heads = width // head_width
        self.norm = nn.GroupNorm(GROUPS, width)
        self.itself = Attended(width, 0, heads, bias=not context)
        self.has_context = bool(context)
        if context:
            self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, width)
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
            self.text = Attended(width, context, heads)
            self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        """(batch, width, h, w) to the same; context (batch, words, channels)."""
        y = self.norm(x).flatten(2).transpose(1, 2)
        if self.has_context:
            y = self.enter(y)
            y = y + self.itself(self.norms[0](y))
            y = y + self.text(self.norms[1](y), context)
            value, gate = self.up(self.norms[2](y)).chunk(2, dim=-1)
            y = self.leave(y + self.down(value * F.gelu(gate)))
        else:
            y = self.itself(y)
        return x + y.transpose(1, 2).unflatten(2, x.shape[-2:])


class Level(nn.Module):
    """A residual part, then attention where ``head_width`` is not 0."""

    def __init__(self, residual: TimedBlock, width: int, head_width: int, context: int) -> None:
        super().__init__()
        self.residual = residual
        self.attention = AttentionPart(width, head_width, context) if head_width else None

    def forward(self, x: Tensor, time: Tensor, context: Tensor | None) -> Tensor:
        """(batch, c_in, h, w) to (batch, c_out, h, w)."""
        x = self.residual(x, time)
        return x if self.attention is None else self.attention(x, context)


class DenoisingUnet(nn.Module):
    """U-Net with two parts a level on the way down, three on the way up.

    ``widths`` of channels by level; ``attended``: levels whose pixels attend to each other;
    ``context``: width of the text's vectors, 0 without a text.
    """

    def __init__(
        self,
        channels: int,
        widths: tuple[int, ...],
        attended: tuple[int, ...],
        head_width: int = 64,
        context: int = 0,
        dropped: float = 0.0,
    ) -> None:
        super().__init__()
        base, time = widths[0], 4 * widths[0]
        self.base = base
        self.times = nn.Sequential(nn.Linear(base, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(channels, base, 3, padding=1)

        def part(c_in: int, c_out: int, level: int) -> Level:
            chosen = head_width if level in attended else 0
            residual = TimedBlock(c_in, c_out, time, GROUPS, dropped)
            return Level(residual, c_out, chosen, context)

        self.down, self.up, kept, c_in = nn.ModuleList(), nn.ModuleList(), [base], base
        for level, width in enumerate(widths):
            for _ in range(2):
                self.down.append(part(c_in, width, level))
                c_in = width
                kept.append(c_in)
            if level < len(widths) - 1:
                self.down.append(nn.Conv2d(c_in, c_in, 3, stride=2, padding=1))
                kept.append(c_in)
        self.middle = nn.ModuleList(
            (
                Level(TimedBlock(c_in, c_in, time, GROUPS, dropped), c_in, head_width, context),
                Level(TimedBlock(c_in, c_in, time, GROUPS, dropped), c_in, 0, context),
            )
        )
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(3):
                self.up.append(part(c_in + kept.pop(), width, level))
                c_in = width
            if level:
                self.up.append(nn.Conv2d(c_in, c_in, 3, padding=1))
        self.norm, self.head = (
            nn.GroupNorm(GROUPS, c_in),
            nn.Conv2d(c_in, channels, 3, padding=1),
        )

    def forward(
        self, images: Tensor, times: Tensor, noise: Tensor | None = None, text: Tensor | None = None
    ) -> Tensor:
        """(batch, channels, h, w) to the same; ``noise`` is the loss's."""
        time = self.times(waves(times, self.base).type_as(images))
        x = self.stem(images)
        kept = [x]
        for part in self.down:
            x = part(x, time, text) if isinstance(part, Level) else part(x)
            kept.append(x)
        for part in self.middle:
            x = part(x, time, text)
        for part in self.up:
            if isinstance(part, Level):
                x = part(torch.cat((x, kept.pop()), dim=1), time, text)
            else:
                x = part(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.head(F.silu(self.norm(x)))


def noise_loss(output: Tensor, inputs: Inputs) -> Tensor:
    """Mean square of the noise that is left."""
    return F.mse_loss(output.float(), inputs["noise"].float())
