"""Hosts are found from measured steps."""

from dataclasses import replace

import pytest

from itercast.compose.capture_model import capture
from itercast.compose.measured_step import MeasuredStep
from itercast.compose.target import find_target, forecast_step
from itercast.extras.calibration.host_fit import fit_host, host_us, runs_ahead, scaled_host
from itercast.learners.bundle import SHIPPED
from itercast.microbench.hardware.host import HostMachine

TARGET = find_target("h100-sxm-80gb", "", SHIPPED)


def measured(slowdown: float, *batches: int) -> list[MeasuredStep]:
    """What forecasts say of a small GPT on an H100, as if it had been measured."""
    found = []
    for batch in batches:
        target = find_target("h100-sxm-80gb", "", SHIPPED)
        step = capture("gpt-s", batch=batch, dtype="bf16")
        host = scaled_host("truth", slowdown, source="by hand")
        time_us = forecast_step(step, replace(target, host=host)).iteration_us
        found.append(MeasuredStep(name=str(batch), time_us=time_us, step=step, target=target))
    return found


def test_the_slowdown_of_a_host_is_found_again() -> None:
    found = fit_host("mine", measured(3.0, 1, 2), source="by hand", fitted_on="x")
    assert found.slowdown == pytest.approx(3.0, rel=0.02)
    assert found.launch_us == pytest.approx(15.0, rel=0.02)
    assert (found.name, found.sources) == ("mine", ("x",))


def test_steps_that_do_not_wait_for_the_host_say_nothing_of_it() -> None:
    rows = measured(0.01, 256)  # kernels set the pace: no slowdown is too slow
    with pytest.raises(ValueError, match="the GPU sets the pace of these 1 rows"):
        fit_host("mine", rows, source="by hand")


def test_both_numbers_of_a_host_come_from_the_time_of_forward_and_backward() -> None:
    """Whatever sets the pace: these steps are not said to take any time."""
    truth = HostMachine(name="truth", slowdown=2.0, launch_us=7.0, source="by hand")
    steps = [
        MeasuredStep(name=case, time_us=1.0, step=capture(case, batch=2), target=TARGET)
        for case in ("gpt-s", "mlp-m", "vit-s")
    ]
    timed = [replace(step, phases_us=host_us(step, truth)) for step in steps]
    found = fit_host("mine", timed, source="by hand")
    assert (found.slowdown, found.launch_us) == (2.0, 7.0)


def test_a_host_that_waits_for_the_gpu_is_not_timed() -> None:
    """96 blocks of some 30 launches each outgrow CUDA's queue; boolean indices wait for a shape."""
    short = MeasuredStep(name="", time_us=1.0, step=capture("mlp-m", batch=2), target=TARGET)
    assert runs_ahead(short)
    assert not runs_ahead(replace(short, step=capture("gpt2-xl", batch=1)))
    # 64 tables of 32 kernels each outgrow it too, unless the GPU is done before the next launch
    tables = replace(short, step=capture("dlrm-r06"), phases_us=5_000.0)
    assert not runs_ahead(tables)
    assert runs_ahead(replace(tables, phases_us=50_000.0))
