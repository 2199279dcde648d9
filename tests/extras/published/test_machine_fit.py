"""Fits of how machines differ, on steps drawn from known spreads."""

from __future__ import annotations

import numpy as np
import pandas as pd

from itercast.compose.machines.state import Spread
from itercast.extras.published.fits.machine_fit import SENSITIVITY, deviates, fit, with_anchors

SPREAD = np.array([0.3, 0.05, 0.05, 0.05, 0.05, 0.05])


def drawn(machines: int) -> pd.DataFrame:
    """Six steps each of three models of machines whose products differ most."""
    draw, rows = np.random.default_rng(0), []
    for at in range(machines):
        factors, effects = draw.normal(0, SPREAD), draw.normal(0, 0.02, 3)
        for step in range(6):
            j = draw.dirichlet(np.ones(6))
            ratio = j @ factors + effects[step % 3] + draw.normal(0, 0.01)
            facts = {"source": f"s{at}", "machine": f"m{at}", "model": str(step % 3)}
            row = {**facts, "log_ratio": ratio, **dict(zip(SENSITIVITY, j, strict=True))}
            rows.append(row)
    return pd.DataFrame(rows)


def test_the_factor_that_differs_is_found() -> None:
    found = fit(drawn(20), means=False)
    assert found.mean == (0.0,) * 6
    assert 0.15 < found.spread[0] < 0.5
    assert max(found.spread[1:]) < found.spread[0]


def test_anchors_make_forecasts_of_the_other_steps_better() -> None:
    steps = drawn(12)
    typical = Spread(mean=(0.0,) * 6, spread=tuple(SPREAD.tolist()), model=0.02, row=0.01)
    off = [with_anchors(steps, typical, n)["log_ratio"].abs().mean() for n in (0, 1, 3)]
    assert off[0] > off[1] > off[2]


def test_intervals_cover_four_fifths_of_sources() -> None:
    """Of steps drawn from a normal distribution 1.28 deviations do."""
    steps = drawn(40)
    typical = Spread(mean=(0.0,) * 6, spread=tuple(SPREAD.tolist()), model=0.02, row=0.01)
    wide = deviates(steps, {str(s): typical for s in steps["source"].unique()})
    assert 1.0 < wide < 1.6
