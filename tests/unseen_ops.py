"""A toy GPU and models of a few ops, for tests of what stands in for the others."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pandas as pd

from microbench.hardware.spec import Gpu

GPU = Gpu(name="toy", sm_count=8, peak_flops_per_s={"fp32": 1e13}, hbm_bytes_per_s=1e12)


def learned(*words: str) -> Any:
    vocabulary = {"op": list(words)}
    envelope = {"log_groups": (0.0, 0.0)}
    return SimpleNamespace(encoder=SimpleNamespace(vocabulary=vocabulary), envelope=envelope)


MODELS: Mapping[str, Any] = {
    "gemm": learned("mm"),
    "elementwise": learned("mul"),
    "conv": learned("forward", "fp32"),
    "norm": learned("layer"),
    "reduction": learned("_softmax"),
}


class Fixed:
    """Everything takes 10 us."""

    models = MODELS

    def price(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> pd.DataFrame:
        us = pd.Series(10.0, index=rows.index)
        columns = {"predicted_us": us, "predicted_us_p10": us, "predicted_us_p90": us}
        return pd.DataFrame({**columns, "in_envelope": True})

    def inside(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> list[bool]:
        return [True] * len(rows)
