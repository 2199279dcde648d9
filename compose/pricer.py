"""Who prices op calls: the one method compose needs of a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import pandas as pd

from microbench.hardware.spec import Gpu


class Pricer(Protocol):
    """A bundle, or a fake in tests."""

    def price(
        self, family: str, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None
    ) -> pd.DataFrame:
        """Columns predicted_us, predicted_us_p10, predicted_us_p90, in_envelope, row by row.

        Raises KeyError where it has no model of the family.
        """
        ...


def price_or_none(pricer: Pricer, family: str, rows: pd.DataFrame, gpu: Gpu) -> pd.DataFrame | None:
    """The prices of the rows; None where the pricer has no model of the family."""
    try:
        return pricer.price(family, rows, {gpu.name: gpu})
    except KeyError as exc:
        if exc.args and family in str(exc.args[0]):
            return None
        raise  # another missing key is a mistake, not a missing model
