"""Forecasts rank software for a call: shares counted by hand."""

import numpy as np
import pytest

from itercast.extras.software_ranking import software_metrics


def test_the_fastest_software_of_each_call() -> None:
    """Two calls of four stacks and one of two.

    The first one's order is right but for one pair of six. The second one's fastest (1 us) comes
    last, the choice takes 2: 3 of 6 pairs are in order.
    """
    call = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    measured = np.array([1.0, 2, 3, 4, 1, 2, 3, 4, 1, 2])
    guess = np.array([1.0, 2, 4, 3, 9, 2, 3, 4, 5, 1])
    stack = np.array([*"abcdabcdab"])
    found = software_metrics(call, stack, guess, measured, 4)
    assert found == pytest.approx(
        {
            "top1_pct": 50,
            "top3_pct": 50,
            "pairwise_pct": 100 * (5 / 6 + 3 / 6) / 2,
            "slower_pct": 100 * (0 + 1) / 2,
            "calls": 2,
        }
    )
    assert software_metrics(call, stack, guess, measured, 2)["calls"] == 3
    assert software_metrics(call, stack, guess, measured, 5) == {}
    twice = np.array([*"abcaabcdab"])  # the first call's first stack was measured twice
    assert software_metrics(call, twice, guess, measured, 4)["calls"] == 1
