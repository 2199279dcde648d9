"""Ranking models over embedding tables: DLRM with a cross network, DCN-v2, DeepFM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from itercast.capture.cases.models.small import Perceptron


class Tables(nn.Module):
    """Embedding bags, one lookup after the other; gradients of ``sparse`` ones hold touched rows.

    Their weights are those of torchrec's DLRM: uniform within 1 / sqrt(rows).
    """

    def __init__(self, rows: Sequence[int], width: int, sparse: bool = False) -> None:
        super().__init__()
        bags = [nn.EmbeddingBag(n, width, mode="sum", sparse=sparse) for n in rows]
        self.bags = nn.ModuleList(bags)
        for bag in bags:
            nn.init.uniform_(bag.weight, -(bag.num_embeddings**-0.5), bag.num_embeddings**-0.5)

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, lookups: Sequence[int]
    ) -> list[torch.Tensor]:
        """(lookups of all tables), (tables, batch), lookups by table to (batch, width) by table."""
        parts = zip(self.bags, indices.split(list(lookups)), offsets.unbind(), strict=True)
        return [bag(index, start) for bag, index, start in parts]


class CrossNetwork(nn.Module):
    """x[l + 1] = x[0] * (W x[l] + b) + x[l], W of a ``rank`` or full (arXiv:2008.13535)."""

    def __init__(self, width: int, layers: int, rank: int = 0) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Linear(width, rank, bias=False) if rank else nn.Identity() for _ in range(layers)
        )
        self.up = nn.ModuleList(nn.Linear(rank or width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) to (batch, width)."""
        first = x
        for down, up in zip(self.down, self.up, strict=True):
            x = first * up(down(x)) + x
        return x


class Ranker(nn.Module):
    """Dense features and tables with ``pooling`` lookups a sample each; empty: one."""

    def __init__(
        self, rows: Sequence[int], pooling: Sequence[int], width: int, sparse: bool = False
    ) -> None:
        super().__init__()
        self.pooling = tuple(pooling) or (1,) * len(rows)
        self.tables = Tables(rows, width, sparse)

    def pooled(self, batch: int, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Pooled vectors (batch, tables * width)."""
        found = self.tables(indices, offsets, [batch * n for n in self.pooling])
        return torch.cat(found, dim=1)


class DlrmDcn(Ranker):
    """DLRM-DCNv2 of MLPerf Training: a cross network of low rank in place of pairwise products.

    Source: https://github.com/facebookresearch/dlrm, torchrec_dlrm, --interaction_type=dcn.
    ``bottom`` and ``top`` are hidden widths; the bottom perceptron ends in ``width``.
    """

    def __init__(
        self,
        features: int,
        bottom: tuple[int, ...],
        rows: tuple[int, ...],
        pooling: tuple[int, ...],
        width: int,
        top: tuple[int, ...],
        layers: int,
        rank: int,
        sparse: bool = False,
    ) -> None:
        super().__init__(rows, pooling, width, sparse)
        self.bottom = Perceptron((features, *bottom, width))
        read = width * (1 + len(rows))
        self.cross = CrossNetwork(read, layers, rank)
        self.top = Perceptron((read, *top, 1))

    def forward(
        self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """(batch, features), (lookups), (tables, batch) to (batch,) logits."""
        x = torch.relu(self.bottom(dense))
        together = torch.cat((x, self.pooled(len(dense), indices, offsets)), dim=1)
        return self.top(self.cross(together)).squeeze(1)


class DcnV2(Ranker):
    """DCN-v2 (arXiv:2008.13535), parallel: a full cross network beside a perceptron."""

    def __init__(
        self,
        features: int,
        rows: tuple[int, ...],
        width: int,
        hidden: tuple[int, ...],
        layers: int,
        pooling: tuple[int, ...] = (),
    ) -> None:
        super().__init__(rows, pooling, width)
        read = features + width * len(rows)
        self.cross, self.deep = CrossNetwork(read, layers), Perceptron((read, *hidden))
        self.logit = nn.Linear(read + hidden[-1], 1)

    def forward(
        self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """(batch, features), (lookups), (tables, batch) to (batch,) logits."""
        x = torch.cat((dense, self.pooled(len(dense), indices, offsets)), dim=1)
        both = torch.cat((self.cross(x), torch.relu(self.deep(x))), dim=1)
        return self.logit(both).squeeze(1)


class DeepFm(Ranker):
    """DeepFM (arXiv:1703.04247): a factorization machine and a perceptron share the tables.

    The machine: a weight per row, and products of all pairs of vectors by ((sum v)^2 - sum v^2)/2.
    """

    def __init__(
        self,
        features: int,
        rows: tuple[int, ...],
        width: int,
        hidden: tuple[int, ...],
        pooling: tuple[int, ...] = (),
    ) -> None:
        super().__init__(rows, pooling, width)
        self.weights, self.dense = Tables(rows, 1), nn.Linear(features, 1)
        self.deep = Perceptron((features + width * len(rows), *hidden, 1))
        self.width = width

    def forward(
        self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """(batch, features), (lookups), (tables, batch) to (batch,) logits."""
        batch = len(dense)
        linear = self.weights(indices, offsets, [batch * n for n in self.pooling])
        pooled = self.pooled(batch, indices, offsets)
        vectors = pooled.view(batch, -1, self.width)
        pairs = (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1)
        first = self.dense(dense) + torch.cat(linear, dim=1).sum(dim=1, keepdim=True)
        deep = self.deep(torch.cat((dense, pooled), dim=1))
        return (first + deep).squeeze(1) + pairs / 2
