"""Widths of intervals, on errors with a known answer."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from itercast.eval.public.widths import by_source, coverage, half_width


def test_a_source_has_one_vote_however_much_it_measured() -> None:
    """Five sources are off by 0 to 0.99, evenly; the sixth by 3, with nine tenths of the rows.

    The five must be covered to 96 %, so that the mean with the sixth, 5 / 6 of it, is 80 %.
    """
    near = {f"s{i}": np.arange(100) / 100 for i in range(5)}
    parts = [pd.Series(v, index=[n] * 100) for n, v in near.items()]
    errors = pd.concat([*parts, pd.Series(-3.0, index=["far"] * 4500)])
    assert half_width(errors) == pytest.approx(0.95, abs=0.011)
    assert coverage(errors, 0.495) == pytest.approx(5 / 6 * 0.5)


def test_each_source_is_judged_by_what_the_others_say() -> None:
    """A source five times as far off as the rest is covered to a fifth, and widens the others'."""
    even = np.arange(100) / 100
    errors = pd.concat([pd.Series(even, index=["a"] * 100), pd.Series(5 * even, index=["b"] * 100)])
    found = by_source(errors)
    assert found.loc["b", "half_width"] == pytest.approx(0.79)
    assert found.loc["b", "covered_pct"] == pytest.approx(16)
    assert found.loc["a", "covered_pct"] == 100
