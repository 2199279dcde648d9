"""Optimizers that sum the rows of a sparse gradient first: Adagrad and Adam, counted by hand."""

from dataclasses import replace

import pytest
from unseen_ops import GPU, MODELS

from itercast.compose.pricing.fallbacks import fallback_parts
from itercast.extras.recommenders.sparse_update import COALESCE, SparseUpdate


def work(p: SparseUpdate) -> tuple[float, float]:
    """Bytes and smallest kernels of a step on a GPU."""
    copy, small = fallback_parts(p, MODELS, False, GPU)
    assert small.params.numel == 1
    return 8.0 * copy.params.numel, small.times


def test_adam_takes_bytes_a_sort_and_the_hottest_row() -> None:
    """10,000 lookups of all 4 rows of 64 numbers in fp32, 256 bytes a row.

    Three passes over looked-up rows and 20 over touched ones, 8 bytes of a row number read and 256
    sorted; 34 kernels and 0.11 for each of the 2,500 lookups of a mean row.
    """
    p = SparseUpdate(op="adam", rows=4, dim=64, lookups=10_000)
    nbytes = (3 * 10_000 + 20 * 4) * 256 + 10_000 * (8 + 256)
    assert work(p) == pytest.approx((nbytes, 34 + 0.11 * 2_500), rel=1e-4)
    skewed = replace(p, rows=2, skew=1.0)  # 1 / (1 + 1/2) of the lookups are of one row
    assert work(skewed)[1] == pytest.approx(34 + 0.11 * 10_000 * 2 / 3)
    assert work(replace(p, op="adagrad"))[0] == pytest.approx(nbytes - 11 * 4 * 256, rel=1e-4)


def test_colder_rows_are_summed_as_an_integral() -> None:
    """A million rows with exponent 1: ln(1e6) + 0.577 of them, 14.39."""
    p = SparseUpdate(op="adam", rows=10**6, dim=64, lookups=10**6, skew=1.0, unique=10**6)
    equal = (work(p)[1] - COALESCE["kernels"]) / COALESCE["kernels_an_equal_row"]
    assert equal == pytest.approx(10**6 / 14.39, rel=0.001)


def test_sgd_sums_no_rows() -> None:
    """Its time is that of its model."""
    assert (
        fallback_parts(SparseUpdate(op="sgd", rows=9, dim=4, lookups=5), MODELS, False, GPU) == []
    )
