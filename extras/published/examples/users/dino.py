"""A ViT that teaches itself (arXiv:2104.14294) as in https://github.com/facebookresearch/dino."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itercast.capture.cases.models.vision import Vit
from itercast.capture.step import Inputs

HEAD = (2048, 256)  # widths within a head, and of what it norms


class DinoNet(nn.Module):
    """A ViT for crops of two sizes, and a head of three layers and many outputs."""

    def __init__(self, width: int, layers: int, heads: int, size: int, outputs: int) -> None:
        super().__init__()
        self.vit = Vit(width, layers, heads, size, 16, HEAD[0])  # its head is this one's first
        wide, narrow = HEAD
        shapes = ((wide, wide), (wide, narrow))
        self.head = nn.ModuleList(nn.Linear(*shape) for shape in shapes)
        self.last = nn.Linear(narrow, outputs, bias=False)

    def through(self, crops: Tensor) -> Tensor:
        """(crops, 3, side, side) to (crops, wide), positions interpolated to the crops' size."""
        x = self.vit.patches(crops)
        side, x = x.shape[-1], x.flatten(2).transpose(1, 2)
        places: Tensor = self.vit.positions
        known = round((places.shape[1] - 1) ** 0.5)
        if side != known:
            grid = places[:, 1:].transpose(1, 2).unflatten(2, (known, known))
            grid = F.interpolate(grid, size=(side, side), mode="bicubic")
            places = torch.cat((places[:, :1], grid.flatten(2).transpose(1, 2)), dim=1)
        x = torch.cat((self.vit.class_token.expand(len(x), -1, -1), x), dim=1) + places
        return self.vit.leave(self.vit.through(x, self.vit.blocks))

    def forward(self, groups: list[Tensor]) -> Tensor:
        """Crops of one size each to (all crops, outputs)."""
        x = torch.cat([self.through(crops) for crops in groups])
        for layer in self.head:
            x = layer(F.gelu(x))
        return self.last(F.normalize(x, dim=-1))


class Dino(nn.Module):
    """A student of all crops and a teacher, which is not trained, of the large ones."""

    def __init__(self, width: int, layers: int, heads: int, size: int, outputs: int) -> None:
        super().__init__()
        sizes = (width, layers, heads, size, outputs)
        self.student, self.teacher = DinoNet(*sizes), DinoNet(*sizes).requires_grad_(False)
        self.center = nn.Buffer(torch.zeros(1, outputs))

    def forward(self, large: Tensor, small: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, 2, 3, size, size), (batch, 8, 3, 96, 96) to outputs by crop, 10 and 2 of them."""
        groups = [crops.transpose(0, 1).flatten(0, 1) for crops in (large, small)]
        with torch.no_grad():
            taught = torch.softmax((self.teacher(groups[:1]) - self.center) / 0.04, dim=-1)
        batch = len(large)
        found = self.student(groups) / 0.1
        return found.unflatten(0, (-1, batch)), taught.unflatten(0, (-1, batch))


def crossed_loss(output: tuple[Tensor, Tensor], inputs: Inputs) -> Tensor:
    """Cross-entropy of each pair of a teacher's and another crop."""
    found, taught = output
    pairs = [(t, s) for t in range(len(taught)) for s in range(len(found)) if s != t]
    losses = [-(taught[t] * F.log_softmax(found[s], dim=-1)).sum(-1).mean() for t, s in pairs]
    return torch.stack(losses).sum() / len(pairs)
