"""How much of models' time lies inside what a bundle was trained on."""

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from itercast.extras.benchmarks.envelope import inside
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.memory.norm import Norm


def test_shares_are_those_of_the_time() -> None:
    """A product of 6 us inside and one of 2 us outside, a norm of 2 us that no model knows."""

    def price(family: str, rows: pd.DataFrame, gpus: Any) -> pd.DataFrame:
        known = rows["m"] <= 64 if family == "gemm" else rows["rows"] < 0
        return pd.DataFrame({"in_envelope": known})

    bundle: Any = SimpleNamespace(price=price)
    step = {
        ("gemm", Gemm(m=64, n=8, k=8)): 6.0,
        ("gemm", Gemm(m=128, n=8, k=8)): 2.0,
        ("norm", Norm(op="layer", rows=4, cols=8)): 2.0,
    }
    found = inside(bundle, load_gpu("h100-sxm-80gb"), [step, {k: 3 * us for k, us in step.items()}])
    assert list(found) == ["all", "gemm", "norm"]
    assert found["gemm"] == pytest.approx((0.8, 0.75))
    assert found["norm"] == pytest.approx((0.2, 0.0))
    assert found["all"] == pytest.approx((1.0, 0.6))
