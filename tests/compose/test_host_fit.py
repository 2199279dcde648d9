"""Hosts are found from measured steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from itercast.compose.capture_model import capture
from itercast.compose.host_fit import MeasuredStep, fit_host
from itercast.compose.target import find_target, forecast_step
from itercast.learners.bundle import SHIPPED
from itercast.microbench.hardware.host import scaled_host


def measured(slowdown: float, *batches: int) -> list[MeasuredStep]:
    """What forecasts say of a small GPT on an H100, as if it had been measured."""
    found = []
    for batch in batches:
        target = find_target("h100-sxm-80gb", "", SHIPPED)
        step = capture("gpt-s", batch=batch, dtype="bf16")
        host = scaled_host("truth", slowdown, source="by hand")
        time_us = forecast_step(step, replace(target, host=host)).iteration_us
        found.append(MeasuredStep(label=str(batch), time_us=time_us, step=step, target=target))
    return found


def test_the_slowdown_of_a_host_is_found_again() -> None:
    found = fit_host("mine", measured(3.0, 1, 2), source="by hand", fitted_on="x")
    assert found.slowdown == pytest.approx(3.0, rel=0.02)
    assert found.launch_us == pytest.approx(15.0, rel=0.02)
    assert (found.name, found.sources) == ("mine", ("x",))


def test_steps_that_do_not_wait_for_the_host_say_nothing_of_it() -> None:
    rows = measured(0.01, 1)  # kernels set the pace: no slowdown is too slow
    with pytest.raises(ValueError, match="the GPU sets the pace of these 1 rows"):
        fit_host("mine", rows, source="by hand")
