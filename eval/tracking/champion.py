"""The model that MLflow loads for a champion: a bundle of one op family that prices rows.

MLflow copies this file beside the bundle and runs it when the model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel


class FamilyPricer(PythonModel):  # type: ignore[misc]
    """Prices a table of an op family's parameters; a missing ``gpu`` is the bundle's only one."""

    def load_context(self, context: Any) -> None:
        """Read the bundle."""
        from learners.bundle import Bundle

        self.bundle = Bundle.load(Path(context.artifacts["bundle"]))
        (self.family,) = self.bundle.models

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:
        """Times in us: predicted_us, its 10 and 90 % quantiles, and in_envelope."""
        rows = model_input
        if "gpu" not in rows:
            if len(self.bundle.gpus) > 1:
                raise ValueError(f"rows need a column gpu: one of {sorted(self.bundle.gpus)}")
            rows = rows.assign(gpu=next(iter(self.bundle.gpus)))
        return self.bundle.price(self.family, rows)


set_model(FamilyPricer())
