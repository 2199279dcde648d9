"""Correlations of made-up op errors: a part common to a GPU, a part of each row's own."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from itercast.eval.intervals.correlations import between_families, within_families


def made_up(of_gpu: float, of_family: float, gpus: int = 300) -> pd.DataFrame:
    """Errors with variance 0.01: these shares of it common to a GPU, and to a family on it."""
    rng, parts = np.random.default_rng(0), []
    for gpu in range(gpus):
        common = rng.normal(0, 0.1 * of_gpu**0.5)
        for family in ("gemm", "norm"):
            own = common + rng.normal(0, 0.1 * of_family**0.5)
            error = own + rng.normal(0, 0.1 * (1 - of_gpu - of_family) ** 0.5, 40)
            parts.append(pd.DataFrame({"gpu": str(gpu), "family": family, "error": error}))
    return pd.concat(parts)


def test_the_shares_of_the_variance_are_found() -> None:
    """Two ops of a family share 0.1 + 0.4 of it, ops of two families 0.1."""
    errors = made_up(0.1, 0.4)
    assert within_families(errors).to_dict() == pytest.approx({"gemm": 0.5, "norm": 0.5}, abs=0.05)
    assert between_families(errors) == pytest.approx(0.1, abs=0.05)


def test_independent_errors_have_none() -> None:
    errors = made_up(0.0, 0.0)
    assert within_families(errors).to_dict() == pytest.approx({"gemm": 0, "norm": 0}, abs=0.02)
    assert between_families(errors) == pytest.approx(0, abs=0.02)
