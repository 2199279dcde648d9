"""A graph network: messages along edges, summed at their ends."""

from __future__ import annotations

import torch
from torch import nn


class GraphLayer(nn.Module):
    """x + relu(own(x) + sum over edges into a node of message(x at the edge's source))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.message = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """(nodes, width) to the same."""
        sent = self.message(x).index_select(0, source) * weight
        received = torch.zeros_like(x).index_add(0, target, sent)
        y: torch.Tensor = self.norm(x + torch.relu(self.own(x) + received))
        return y


class GraphNet(nn.Module):
    """Graph convolutions over an edge list, then the mean over each graph and a linear head."""

    def __init__(self, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(
        self,
        nodes: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
        graph: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        """(nodes, features) to (graphs, classes).

        ``source`` and ``target`` are (edges,) node numbers, ``weight`` is (edges, 1), ``graph``
        (nodes,) graph numbers; of ``labels`` only the number is used.
        """
        x = torch.relu(self.enter(nodes))
        for layer in self.layers:
            x = layer(x, source, target, weight)
        total = x.new_zeros(len(labels), x.shape[1]).index_add(0, graph, x)
        logits: torch.Tensor = self.head(total * (len(labels) / len(nodes)))
        return logits
