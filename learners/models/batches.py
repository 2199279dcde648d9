"""Batches of rows, as XGBoost asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xgboost as xgb

from itercast.learners.models.training_table import Batch


class Batches(xgb.DataIter):
    """Hands batches to XGBoost, with the columns ``zeroed`` set to 0; ``pages``: see ``Pieces``."""

    def __init__(
        self, loads: Sequence[Callable[[], Batch]], zeroed: Sequence[int], pages: str | None
    ) -> None:
        self._loads, self._zeroed, self._at = loads, list(zeroed), 0
        super().__init__(cache_prefix=pages, on_host=False)

    def next(self, input_data: Callable[..., None]) -> bool:
        """Hand over the next batch; False after the last."""
        if self._at == len(self._loads):
            return False
        x, log_ratio = self._loads[self._at]()
        if self._zeroed:
            x = x.copy()
            x[:, self._zeroed] = 0
        input_data(data=x, label=log_ratio)
        self._at += 1
        return True

    def reset(self) -> None:
        """Begin anew."""
        self._at = 0
