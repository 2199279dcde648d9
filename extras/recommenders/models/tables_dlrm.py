"""The network of a DLRM of which some tables are looked up elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from itercast.extras.recommenders.models.dlrm import DenseDlrm


class TablesDlrm(nn.Module):
    """A DLRM that looks up only some tables itself: those in ``copies``, which every rank has.

    ``rows``: their numbers of rows, by table number; ``dtypes``: fp32 by default. ``sizes``:
    (features, bottom, tables, width, top) of ``DenseDlrm``, where ``tables`` counts all tables.
    """

    def __init__(
        self,
        sizes: tuple[int, tuple[int, ...], int, int, tuple[int, ...]],
        rows: Mapping[int, int],
        dtypes: Mapping[int, torch.dtype] | None = None,
    ) -> None:
        super().__init__()
        self.dense, width = DenseDlrm(*sizes), sizes[3]
        bags = {
            str(t): nn.EmbeddingBag(n, width, mode="sum", dtype=(dtypes or {}).get(t))
            for t, n in rows.items()
        }
        self.copies = nn.ModuleDict(bags)

    def forward(
        self, dense: torch.Tensor, lookups: Sequence[Any], wait: Callable[[], dict[int, Any]] = dict
    ) -> torch.Tensor:
        """Logits of dense features (batch, features), own lookups, and vectors of other tables.

        A lookup is row numbers, starts of bags, and weights if there are any, by table. ``wait``
        returns the other tables' vectors.
        """
        found = {int(t): bag(*lookups[int(t)]) for t, bag in self.copies.items()}
        x = torch.relu(self.dense.bottom(dense))
        found |= wait()
        pooled = [x, *(found[t].to(x.dtype) for t in sorted(found))]
        return self.dense.interact(x, torch.stack(pooled, dim=1))
