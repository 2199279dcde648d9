"""How well forecasts tell plans apart, counted by hand."""

from math import log

import pytest

from itercast.extras.benchmarks.plan_pairs import differences


def test_pairs_are_plans_of_one_model_on_as_many_ranks() -> None:
    """Measured 2 : 1, forecast 1 : 1 is log 2; other models and numbers of ranks make no pair."""
    first = {"gpu": "cpu", "model": "a", "ranks": 2, "samples": 8, "plan": "dp=2"}
    first |= {"measured_us": 20.0, "predicted_us": 10.0}
    second = first | {"plan": "tp=2", "measured_us": 10.0}
    others = [second | {"model": "b"}, second | {"ranks": 4}, first]
    assert differences([first, second]) == [pytest.approx(log(2))]
    assert differences([first, *others]) == []
