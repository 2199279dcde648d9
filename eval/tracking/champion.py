"""The model that MLflow loads for a champion: a bundle of one op family that prices rows.

MLflow imports this module when it loads the model; itercast has to be installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from itercast.learners.bundle import Bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyPricer:
    """Prices a table of an op family's parameters; a missing ``gpu`` is the bundle's only one."""

    family: str
    bundle: Bundle

    def predict(self, model_input: pd.DataFrame, params: object = None) -> pd.DataFrame:
        """Forecast each row's time: predicted_us, its 10 and 90 % quantiles (us), in_envelope."""
        rows = model_input
        if "gpu" not in rows:
            if len(self.bundle.gpus) > 1:
                raise ValueError(f"rows need a column gpu: one of {sorted(self.bundle.gpus)}")
            rows = rows.assign(gpu=next(iter(self.bundle.gpus)))
        return self.bundle.price(self.family, rows)


def _load_pyfunc(path: str) -> FamilyPricer:
    """Read the bundle that lies beside the model; MLflow calls this function by its name."""
    bundle = Bundle.load(Path(path))
    (family,) = bundle.models
    return FamilyPricer(family=family, bundle=bundle)
