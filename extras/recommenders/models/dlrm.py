"""DLRM: a recommendation model of dense features and embedding tables."""

from __future__ import annotations

import torch
from torch import nn

from itercast.capture.cases.models.small import Perceptron


class DenseDlrm(nn.Module):
    """A DLRM (arXiv:1906.00091) without its tables: it is given their pooled vectors.

    Pairwise products of dense features and embeddings predict a click. ``bottom`` and ``top`` are
    the hidden widths of the two perceptrons: the bottom one ends in ``width``, the top one starts
    at the products and ends in one logit. The input of the top perceptron is padded with zeros to
    a ``multiple`` of features.
    """

    lower: torch.Tensor

    def __init__(
        self,
        features: int,
        bottom: tuple[int, ...],
        tables: int,
        width: int,
        top: tuple[int, ...],
        multiple: int = 1,
    ) -> None:
        super().__init__()
        vectors = tables + 1
        self.bottom = Perceptron((features, *bottom, width))
        read = width + vectors * (vectors - 1) // 2
        self.padding = -read % multiple
        self.top = Perceptron((read + self.padding, *top, 1))
        pairs = [i * vectors + j for i in range(vectors) for j in range(i)]
        self.register_buffer("lower", torch.tensor(pairs), persistent=False)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Maps (batch, features) and pooled vectors (batch, tables, width) to (batch,) logits."""
        x = torch.relu(self.bottom(dense))
        return self.interact(x, torch.cat((x.unsqueeze(1), pooled), dim=1))

    def interact(self, x: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Maps (batch, width) and vectors (batch, 1 + tables, width) to (batch,) logits."""
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        pairs = products.index_select(1, self.lower)
        zeros = [x.new_zeros(len(x), self.padding)] if self.padding else []
        return self.top(torch.cat((x, pairs, *zeros), dim=1)).squeeze(1)


class Dlrm(DenseDlrm):
    """A DLRM with its tables, one lookup after the other.

    ``rows`` is one number for all tables or one for each. Gradients of ``sparse`` tables hold only
    the rows looked up.
    """

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
        super().__init__(features, bottom, tables, width, top, multiple)
        heights = (rows,) * tables if isinstance(rows, int) else rows
        bags = [nn.EmbeddingBag(n, width, mode="sum", sparse=sparse) for n in heights]
        self.tables = nn.ModuleList(bags)
        for table in bags:
            bound = table.num_embeddings**-0.5
            nn.init.uniform_(table.weight, -bound, bound)

    def forward(  # type: ignore[override]
        self,
        dense: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        clicked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(batch, features), (tables, batch * bag), (batch,) to (batch,) logits.

        ``clicked`` is for the loss only.
        """
        x = torch.relu(self.bottom(dense))
        bags = [t(i, offsets) for t, i in zip(self.tables, indices.unbind(), strict=True)]
        return self.interact(x, torch.stack((x, *bags), dim=1))
