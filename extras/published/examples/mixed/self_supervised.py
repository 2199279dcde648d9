"""ResNet-50s that teach themselves, in the code of their authors.

Barlow Twins (arXiv:2103.03230, https://github.com/facebookresearch/barlowtwins) and SwAV
(arXiv:2006.09882, https://github.com/facebookresearch/swav). Both are without a classifier.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itercast.capture.cases.models.vision import ResNet

FEATURES = 2048
SHARPNESS, ROUNDS, TEMPERATURE = 0.05, 3, 0.1  # of SwAV's assignments and predictions
OFF_DIAGONAL = 0.0051  # weight of Barlow Twins' second term


def backbone() -> ResNet:
    """A ResNet-50 up to its pooled features."""
    network = ResNet(64, (3, 4, 6, 3), True)
    network.head = nn.Identity()  # type: ignore[assignment]
    return network


class BarlowTwins(nn.Module):
    """Correlation of the projections of two views of each image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.backbone = backbone()
        parts: list[nn.Module] = []
        for c_in in (FEATURES, width):
            parts += [nn.Linear(c_in, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(True)]
        self.projector = nn.Sequential(*parts, nn.Linear(width, width, bias=False))
        self.norm = nn.BatchNorm1d(width, affine=False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Views (batch, 3, h, w) to their loss."""
        a, b = (self.norm(self.projector(self.backbone(view))) for view in (first, second))
        c = a.T @ b / len(first)
        width = len(c)
        off = c.flatten()[:-1].view(width - 1, width + 1)[:, 1:].flatten()
        return (torch.diagonal(c) - 1).pow(2).sum() + OFF_DIAGONAL * off.pow(2).sum()


class Swav(nn.Module):
    """Clusters of crops: those of the large crops are predicted from all others."""

    def __init__(self, clusters: int = 3000, width: int = 128) -> None:
        super().__init__()
        self.backbone = backbone()
        self.projector = nn.Sequential(
            *(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)),
            *(nn.ReLU(True), nn.Linear(FEATURES, width)),
        )
        self.prototypes = nn.Linear(width, clusters, bias=False)

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        """Crops (2, batch, 3, 224, 224) and (6, batch, 3, 96, 96) to their loss."""
        batch = large.shape[1]
        features = torch.cat([self.backbone(crops.flatten(0, 1)) for crops in (large, small)])
        scores = self.prototypes(F.normalize(self.projector(features), dim=1)).split(batch)
        losses = []
        for taught in range(len(large)):
            target = balanced(scores[taught].detach())
            for number, found in enumerate(scores):
                if number != taught:
                    log = F.log_softmax(found / TEMPERATURE, dim=1)
                    losses.append(-(target * log).sum(1).mean())
        return torch.stack(losses).mean()


@torch.no_grad()
def balanced(scores: Tensor) -> Tensor:
    """Sinkhorn-Knopp: assignments (batch, clusters) that use all clusters alike."""
    q = torch.exp(scores / SHARPNESS).T
    q = q / q.sum()
    for _ in range(ROUNDS):
        q = q / q.sum(1, keepdim=True) / len(q)
        q = q / q.sum(0, keepdim=True) / q.shape[1]
    return (q * q.shape[1]).T


def barlow_twins(batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Three layers of 8,192 behind the network, as main.py has them by default."""
    return BarlowTwins(8192), (torch.randn(batch, 3, 224, 224), torch.randn(batch, 3, 224, 224))


def swav(batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Two crops of 224 and six of 96 pixels."""
    return Swav(), (torch.randn(2, batch, 3, 224, 224), torch.randn(6, batch, 3, 96, 96))
