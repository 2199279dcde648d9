"""A small GPT's step, captured once, and a pricer that knows one price per family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import pytest

from itercast.api import capture_case
from microbench.cases.registry import case
from microbench.opcall import StepCapture


class Flat:
    """Every op takes 10 us, an elementwise one 1, a collective 1 us per KiB; bounds 20 % off."""

    models: Mapping[str, Any] = dict.fromkeys(
        ("gemm", "attention", "norm", "reduction", "embedding", "index", "optimizer", "host")
    ) | {"elementwise": None, "collective": None}

    def price(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> pd.DataFrame:
        us = pd.Series({"elementwise": 1.0, "host": 0.0}.get(family, 10.0), index=rows.index)
        if family == "collective":
            us = rows["message_bytes"] / 1024
        columns = {"predicted_us": us, "predicted_us_p10": us * 0.8, "predicted_us_p90": us * 1.2}
        return pd.DataFrame({**columns, "in_envelope": True})


@pytest.fixture(scope="session")
def gpt() -> StepCapture:
    """Two layers, four heads, four sequences of 64 tokens."""
    return capture_case(case("gpt-s"))
