"""Fits of how machines differ, on steps drawn from known spreads."""

import re

import numpy as np
import pandas as pd
import pytest
import yaml

from itercast.compose.machines.state import Anchor, Machine, Spread
from itercast.extras.published.fits.in_practice import TRAININGS, times_by_source
from itercast.extras.published.fits.machine_fit import (
    SENSITIVITY,
    calibrated,
    deviates,
    fit,
    forecasts,
    with_anchors,
)
from itercast.extras.published.fits.machines import ROOT, RUNS, TYPICAL
from itercast.extras.published.fits.ranking import ranked, ranks
from itercast.extras.published.roles import ROLES

SPREAD = np.array([0.3, 0.05, 0.05, 0.05, 0.05])


def drawn(machines: int) -> pd.DataFrame:
    """Six steps each of three models of machines whose products differ most."""
    draw, rows = np.random.default_rng(0), []
    for at in range(machines):
        factors, effects = draw.normal(0, SPREAD), draw.normal(0, 0.02, 3)
        for step in range(6):
            j = draw.dirichlet(np.ones(5))
            ratio = j @ factors + effects[step % 3] + draw.normal(0, 0.01)
            facts = {"source": f"s{at}", "machine": f"m{at}", "model": str(step % 3)}
            row = {**facts, "log_ratio": ratio, **dict(zip(SENSITIVITY, j, strict=True))}
            rows.append(row)
    return pd.DataFrame(rows)


def test_the_factor_that_differs_is_found() -> None:
    found = fit(drawn(20))
    assert 0.15 < found.spread[0] < 0.5
    assert max(found.spread[1:]) < found.spread[0]


def test_anchors_make_forecasts_of_the_other_steps_better() -> None:
    steps = drawn(12)
    typical = Spread(spread=tuple(SPREAD.tolist()), model=0.02, row=0.01)
    off = [with_anchors(steps, typical, n)["log_ratio"].abs().mean() for n in (0, 1, 3)]
    assert off[0] > off[1] > off[2]


def test_intervals_cover_four_fifths_of_sources() -> None:
    """Of sources left out, on new machines and with an anchor."""
    steps = drawn(20)
    _, without = calibrated(steps)
    for count in (0, 1):
        found = forecasts(steps, without, count)
        assert found["covered"].groupby(found["source"]).mean().mean() >= 0.76


def test_intervals_end_where_a_fifth_is_farther() -> None:
    """Ten steps 0.1, 0.2 to 1.0 deviations off: each is a tenth, 80 % end between 0.8 and 0.9."""
    far = [0.1, -0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, -1.0]
    off = pd.DataFrame({"source": "one", "log_ratio": far, "deviation": 1.0})
    assert deviates(off) == pytest.approx(0.85)


@pytest.mark.parametrize("off", [1.0, -1.0])
def test_what_the_ends_of_an_interval_lose(off: float) -> None:
    """exp(1) times as long as forecast, above both ends: 0.1 and 0.9 of how far; or as short."""
    steps = drawn(1).iloc[:1].assign(log_ratio=off)
    typical = Spread(spread=tuple(SPREAD.tolist()), model=0.02, row=0.01, deviates=0.5)
    found = with_anchors(steps, typical, 0).iloc[0]
    end = 0.5 * found["deviation"]
    assert found["loss"] == pytest.approx(0.1 * (1 + end) + 0.9 * (1 - end))
    assert not found["covered"]


def test_forecasts_are_those_of_a_machine_with_anchors() -> None:
    steps = drawn(1).iloc[:2]
    typical = Spread(spread=tuple(SPREAD.tolist()), model=0.02, row=0.01)
    (_, told), (_, asked) = steps.iterrows()
    j, other = (tuple(float(row[name]) for name in SENSITIVITY) for row in (told, asked))
    anchor = Anchor(model=told["model"], sensitivity=j, log_ratio=told["log_ratio"])
    known = Machine.new(typical).updated([anchor])
    found = with_anchors(steps, typical, 1).iloc[0]
    logs = np.array(known.factors(asked["model"]).logs)
    assert found["log_ratio"] == pytest.approx(asked["log_ratio"] - np.array(other) @ logs)
    assert found["half"] == pytest.approx(known.half_width(other, asked["model"]))


def test_a_step_that_is_not_believed_is_no_anchor() -> None:
    """Ten times as long as forecast: the other step is forecast as without it."""
    steps = drawn(1).iloc[:2].assign(log_ratio=[2.3, 0.0])
    typical = Spread(spread=tuple(SPREAD.tolist()), model=0.02, row=0.01)
    first, other = with_anchors(steps, typical, 1)["log_ratio"]
    assert (first, other) == (0.0, 2.3)


def two_plans() -> pd.DataFrame:
    """Steps of 8 samples, forecast at 100 and 110 us; the first, all network, takes 200."""
    plans = {"dp=8": (200.0, "d_network", 100.0, 1), "dp=4,tp=2": (110.0, "d_products", 110.0, 2)}
    rows = [
        {
            **{"source": "s", "machine": "m", "model": "a", "plan": plan, "batch": batch},
            **{"seq": np.nan, "dtype": "bf16", "world_size": 8, **dict.fromkeys(SENSITIVITY, 0.0)},
            **{name: 1.0, "time_us": time_us, "log_ratio": np.log(time_us / forecast_us)},
        }
        for plan, (time_us, name, forecast_us, batch) in plans.items()
    ]
    return pd.DataFrame(rows)


def test_an_anchor_tells_which_plan_is_best() -> None:
    """The first plan is forecast to be the better one.

    As an anchor it is taken for 0.09 / (0.09 + 0.01) of log(2) more: the second is chosen. That
    one, all products, is as forecast and tells nothing, so that one of two choices is right.
    """
    typical = Spread(spread=(0.3,) * 5, model=0.0, row=0.1)
    found = ranked(two_plans(), typical)
    assert (found["tau"], found["tau_anchor"]) == (-1.0, 0.0)
    loss = 100 * (200 / 110 - 1)
    assert found["loss_pct"] == pytest.approx(loss)
    assert found["loss_pct_anchor"] == pytest.approx(loss / 2)


def test_plans_of_as_many_samples_are_ranked() -> None:
    """8 samples and 2 x 4 are a set, of a model without a length, too; 8 and 1 x 4 are none."""
    steps = pd.concat([two_plans(), two_plans().assign(source="t", machine="n")], ignore_index=True)
    found = ranks(steps)
    assert len(found) == 2 and (found["plans"] == 2).all()
    assert ranks(steps.assign(batch=1)).empty


def test_the_shipped_spreads_are_of_sources_that_find_causes() -> None:
    """Of all files of measured steps that do."""
    text = TYPICAL.read_text()
    without = set(yaml.safe_load(text)["without"])
    finding = {name.casefold() for name in ROLES["finds causes"]}
    files = {path.stem for path in ROOT.glob(RUNS)} & finding
    assert files <= without <= finding
    total, counts = re.findall(r"fits.machines, (\d+) steps .*\n# (.*)", text)[0]
    each = {name.casefold(): int(n) for name, n in (c.split() for c in counts.split(", "))}
    assert set(each) == without and sum(each.values()) == int(total)


def test_how_many_times_as_long_trainings_took_by_source_and_by_text() -> None:
    """Of two steps that take twice and eight times as long the geometric mean is four."""
    facts = {"source": ["mae", "mae", "mae", "zeus"], "seq": [0, np.nan, 128, 0]}
    steps = pd.DataFrame({**facts, "log_ratio": np.log([2.0, 8.0, 3.0, 1.5])})
    found = times_by_source(steps).set_index(["source", "text"])
    assert found["times"].to_dict() == pytest.approx(
        {("mae", False): 4.0, ("mae", True): 3.0, ("zeus", False): 1.5}
    )
    assert found["training"].tolist() == [True, True, False]
    assert {name for sources in ROLES.values() for name in sources} >= TRAININGS
