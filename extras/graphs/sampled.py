"""GraphSAGE over sampled neighbours, and the graphs that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from itercast.capture.cases.kinds import Sizes
from itercast.capture.step import Inputs
from itercast.extras.lookups.reuse import expected_reuse


class GatheredSage(nn.Module):
    """GraphSAGE with mean over sampled neighbours (arXiv:1706.02216), whose features are given."""

    def __init__(self, features: int, width: int, classes: int, fanout: Sequence[int]) -> None:
        super().__init__()
        widths = [features, *[width] * (len(fanout) - 1), classes]
        pairs = list(pairwise(widths))
        self.own = nn.ModuleList(nn.Linear(*pair) for pair in pairs)
        self.neighbours = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in pairs)

    def forward(
        self, x: torch.Tensor, blocks: Sequence[torch.Tensor], labels: torch.Tensor
    ) -> torch.Tensor:
        """Features of distinct vertices to (batch, classes); labels are not used.

        A block is a sparse matrix that takes the mean over each vertex's sampled neighbours.
        """
        for i, block in enumerate(blocks):
            x = self.own[i](x[: len(block)]) + self.neighbours[i](torch.sparse.mm(block, x))
            x = torch.relu(x) if i + 1 < len(blocks) else x
        return x


class SampledSage(GatheredSage):
    """``GatheredSage`` with a table of features of all vertices, which is not trained."""

    def __init__(self, vertices: int, features: int, **sizes: Any) -> None:
        super().__init__(features, **sizes)
        self.features = nn.Embedding(vertices, features)
        self.features.weight.requires_grad = False

    def forward(
        self, vertices: torch.Tensor, blocks: Sequence[torch.Tensor], labels: torch.Tensor
    ) -> torch.Tensor:
        """Numbers of distinct ``vertices`` to (batch, classes)."""
        return super().forward(self.features(vertices), blocks, labels)


def sampled_vertices(batch: int, sizes: Sizes) -> list[int]:
    """Vertices whose values each layer makes, from the batch to those whose features are read.

    For each vertex of a layer ``fanout`` neighbours are drawn, or as many as it has on average.
    Expected are the distinct ones of all that are drawn, with the Zipf exponent ``skew``.
    """
    vertices, drawn = [batch], 0
    for fanout in sizes["fanout"]:
        drawn += vertices[-1] * min(fanout, sizes["degree"])
        distinct = float(expected_reuse(sizes["vertices"], drawn, sizes["skew"], 0.0)[0])
        vertices.append(min(sizes["vertices"], batch + round(distinct)))
    return vertices


def sampled_graph(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Blocks of a sampled graph, that of the features first; neighbours are drawn at random."""
    vertices = sampled_vertices(batch, sizes)
    blocks = []
    for fanout, rows, cols in zip(sizes["fanout"], vertices[:-1], vertices[1:], strict=True):
        drawn = min(fanout, sizes["degree"])
        starts, values = (
            torch.arange(0, rows * drawn + 1, drawn),
            torch.full((rows * drawn,), 1 / drawn),
        )
        source = torch.randint(0, cols, (rows * drawn,))
        blocks.append(torch.sparse_csr_tensor(starts, source, values, (rows, cols)))
    return {
        "vertices": torch.randint(0, sizes["vertices"], vertices[-1:]),
        "blocks": blocks[::-1],
        "labels": torch.randint(0, sizes["classes"], (batch,)),
    }


def gathered_graph(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """``sampled_graph`` with random features of its vertices in place of their numbers."""
    graph = sampled_graph(batch, seq, sizes)
    vertices: torch.Tensor = graph.pop("vertices")
    return {"x": torch.randn(len(vertices), sizes["features"]), **graph}
