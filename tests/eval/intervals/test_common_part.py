"""Fits of what errors of iterations have in common, on made-up errors with a known answer."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from itercast.compose.intervals.correlated_errors import ASSUMED, SHARED
from itercast.eval.intervals.common_part import (
    CommonPart,
    coverage,
    covered,
    fit,
    half_widths,
    left_out,
)

NORMAL_90 = 1.2816  # 90 % quantile of the normal distribution with deviation 1


def made_up(
    sources: int = 6, each: int = 400, shared: float = 0.2, assumed: float = 0.5
) -> pd.DataFrame:
    """Errors whose 80 % interval has these half widths, beside 0.1 by the ops."""
    rng = np.random.default_rng(0)
    frac = rng.choice([0.0, 0.1, 0.8, 1.0], sources * each)
    half = np.sqrt(0.1**2 + shared**2 + (assumed * frac) ** 2)
    return pd.DataFrame(
        {
            "source": np.repeat([f"s{i}" for i in range(sources)], each),
            "error": rng.normal(0, half / NORMAL_90),
            "below": 0.1,
            "above": 0.1,
            "assumed_frac": frac,
        }
    )


def test_half_widths_are_those_without_the_common_part() -> None:
    """An interval of half width h: what is left of h**2 without the common squares."""
    common = SHARED["gpu"] ** 2 + (0.5 * ASSUMED) ** 2
    half = (0.3**2 + common) ** 0.5
    row = {"source": "s", "measured": 110.0, "predicted": 100.0, "assumed_frac": 0.5}
    row |= {"p10": 100 * np.exp(-half), "p90": 100 * np.exp(half)}
    found = half_widths(pd.DataFrame([row]), "gpu").iloc[0]
    assert found["below"] == pytest.approx(0.3)
    assert found["above"] == pytest.approx(0.3)
    assert found["error"] == pytest.approx(np.log(1.1))


def test_what_is_covered_by_hand() -> None:
    """Half width 0.5 = (0.3**2 + 0.4**2)**0.5; 1 where all of it is assumed at 0.866."""
    rows = pd.DataFrame(
        {
            "source": ["a", "a", "b", "b"],
            "error": [0.49, -0.51, 0.99, 1.01],
            "below": 0.3,
            "above": 0.3,
            "assumed_frac": [0.0, 0.0, 1.0, 1.0],
        }
    )
    part = CommonPart(shared=0.4, assumed=0.75**0.5)
    assert covered(rows, part).tolist() == [True, False, True, False]
    assert coverage(rows, part) == 0.5


def test_the_fit_finds_what_the_errors_were_made_of() -> None:
    found = fit(made_up())
    assert found.shared == pytest.approx(0.2, abs=0.03)
    assert found.assumed == pytest.approx(0.5, abs=0.08)


def test_a_source_has_one_vote_however_much_it_measured() -> None:
    """Five exact sources and one that is far off with most of the rows: it is left uncovered."""
    rows = made_up(sources=5, each=50, assumed=0.0)
    far = made_up(sources=1, each=2000).assign(source="far", error=3.0)
    assert fit(pd.concat([rows, far])).shared < 1.0


def test_each_source_is_judged_by_what_the_others_say() -> None:
    """A source whose errors are five times as large is not covered; it does not widen its own."""
    rows = made_up()
    rows.loc[rows["source"] == "s0", "error"] *= 5
    found = {line["source"]: line for line in left_out(rows).to_dict("records")}
    assert found["s0"]["coverage_pct"] < 40
    assert found["s1"]["coverage_pct"] > 75
    assert found["s0"]["shared"] < found["s1"]["shared"]
