"""Graph networks over edge lists: messages along edges are summed at their target nodes."""

from __future__ import annotations

import torch
from torch import nn

from itercast.capture.cases.kinds import Sizes
from itercast.capture.step import Inputs


class GraphLayer(nn.Module):
    """Graph convolution: norm(x + relu(own(x) + sum of message(x[source]) over incoming edges))."""

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
        return self.norm(x + torch.relu(self.own(x) + received))


class GraphAttention(nn.Module):
    """Graph attention: messages weighted by a softmax over incoming edges (arXiv:1710.10903)."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.message = nn.Linear(width, width, bias=False)
        self.score = nn.Parameter(torch.randn(heads, 2 * width // heads) / width**0.5)

    def forward(
        self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """(nodes, width) to the same; ``weight`` is not used."""
        sent = self.message(x).view(len(x), self.heads, -1)
        pairs = torch.cat((sent[source], sent[target]), dim=-1)
        scores = nn.functional.leaky_relu((pairs * self.score).sum(-1), 0.2).exp()
        total = scores.new_zeros(len(x), self.heads).index_add(0, target, scores)
        shares = (scores / total[target]).unsqueeze(-1)
        received = torch.zeros_like(sent).index_add(0, target, sent[source] * shares)
        return x + nn.functional.elu(received.flatten(1))


class GraphNet(nn.Module):
    """Graph network that classifies whole graphs: layers, mean over nodes, linear head."""

    def __init__(
        self, features: int, width: int, layers: int, classes: int, attention: bool = False
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        kind = GraphAttention if attention else GraphLayer
        self.layers = nn.ModuleList(kind(width) for _ in range(layers))
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
        (nodes,) graph numbers; only the length of ``labels`` is used.
        """
        x = torch.relu(self.enter(nodes))
        for layer in self.layers:
            x = layer(x, source, target, weight)
        total = x.new_zeros(len(labels), x.shape[1]).index_add(0, graph, x)
        return self.head(total * (len(labels) / len(nodes)))


def graphs(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Random graphs of ``nodes`` nodes with ``degree`` edges each on average."""
    nodes, degree = sizes["nodes"], sizes["degree"]
    edges = batch * nodes * degree
    first = torch.arange(batch).mul(nodes).repeat_interleave(nodes * degree, output_size=edges)
    return {
        "nodes": torch.randn(batch * nodes, sizes["features"]),
        "source": first + torch.randint(0, nodes, (edges,)),
        "target": first + torch.randint(0, nodes, (edges,)),
        "weight": torch.full((edges, 1), 1 / degree),
        "graph": torch.arange(batch).repeat_interleave(nodes, output_size=batch * nodes),
        "labels": torch.randint(0, sizes["classes"], (batch,)),
    }
