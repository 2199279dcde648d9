"""Recommendation: dense features and embedding tables, pairwise products, a click."""

from __future__ import annotations

import torch
from torch import nn

from microbench.cases.small import Perceptron


class Dlrm(nn.Module):
    """DLRM (arXiv:1906.00091); gradients of ``sparse`` tables hold the rows looked up alone.

    ``bottom`` and ``top`` are widths of the two perceptrons without the ones that follow from the
    rest: the bottom ends in ``width``, the top starts at the interactions and ends in one logit.
    ``rows`` is one number for all tables or one for each. What the top reads is padded with zeros
    to a ``multiple`` of numbers a sample.
    """

    lower: torch.Tensor

    def __init__(
        self,
        features: int,
        bottom: tuple[int, ...],
        tables: int,
        rows: int | tuple[int, ...],
        width: int,
        top: tuple[int, ...],
        sparse: bool = False,
        multiple: int = 1,
    ) -> None:
        super().__init__()
        vectors = tables + 1
        self.bottom = Perceptron((features, *bottom, width))
        heights = (rows,) * tables if isinstance(rows, int) else rows
        bags = [nn.EmbeddingBag(n, width, mode="sum", sparse=sparse) for n in heights]
        self.tables = nn.ModuleList(bags)
        read = width + vectors * (vectors - 1) // 2
        self.padding = -read % multiple
        self.top = Perceptron((read + self.padding, *top, 1))
        pairs = [i * vectors + j for i in range(vectors) for j in range(i)]
        self.register_buffer("lower", torch.tensor(pairs), persistent=False)
        for table in bags:
            bound = table.num_embeddings**-0.5
            nn.init.uniform_(table.weight, -bound, bound)

    def forward(
        self,
        dense: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        clicked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(batch, features), (tables, batch * bag), (batch,) to (batch,) logits.

        ``clicked`` is there for the loss alone.
        """
        x = torch.relu(self.bottom(dense))
        bags = [t(i, offsets) for t, i in zip(self.tables, indices.unbind(), strict=True)]
        vectors = torch.stack((x, *bags), dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        pairs = products.index_select(1, self.lower)
        zeros = [x.new_zeros(len(x), self.padding)] if self.padding else []
        logits: torch.Tensor = self.top(torch.cat((x, pairs, *zeros), dim=1)).squeeze(1)
        return logits
