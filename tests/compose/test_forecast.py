"""Forecasts by hand, from a pricer that knows one price."""

from collections.abc import Mapping
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from plan_case import GPU, Fixed, tensor
from small_scripts import captured, written

from itercast.api import predict
from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import HALF_WIDTH, IN_PRACTICE, Forecast, as_trained, forecast
from itercast.compose.machines.factors import NONE
from itercast.compose.machines.state import DEVIATES
from itercast.compose.machines.typical import typical
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import priceable
from itercast.compose.programs.forecast import forecast_program
from itercast.compose.target import find_target
from itercast.microbench.hardware.spec import Gpu

CPU = Gpu(name="toy", kind="cpu", sm_count=2, peak_flops_per_s={"fp32": 1e12}, l2_bytes=4000)


class Products(Fixed):
    """Warm ones take 10 us, cold ones 30."""

    models: Mapping[str, Any] = {"gemm": None}

    def us(self, family: str, rows: pd.DataFrame) -> Any:
        return rows["cache"].map({"warm": 10.0, "cold": 30.0})


def product(a: int, b: int, c: int) -> OpCall:
    args = (tensor(a, 10, 10), tensor(b, 10, 10))
    return OpCall(op="aten.mm.default", args=args, outputs=(tensor(c, 10, 10),))


def test_host_events_add_to_ops_on_a_cpu() -> None:
    capture = StepCapture(calls=(product(0, 1, 2),), host={"module_call": 2, "view_op": 1})
    found = forecast(
        replace(capture, optimizer="adamw"), ParallelPlan(), PriceBook(Products(), CPU, 2)
    )
    assert found.iteration_us == pytest.approx(10 + 2 * 3.0 + 2.0)
    assert found.iteration_us == found.compute_us + found.exposed_comm_us + found.idle_us
    assert found.unmodelled_frac == 0
    factor = exp(HALF_WIDTH)  # of the 80 % interval, alike for all iterations on a CPU
    assert found.iteration_us_p10 == pytest.approx(18 / factor)
    assert found.iteration_us_p90 == pytest.approx(18 * factor)


def test_an_op_without_a_family_is_priced_by_its_bytes_and_counted() -> None:
    """16 bytes at 1e9 bytes/s are 0.016 us, and 2 us of overhead."""
    call = OpCall(op="aten.unheard_of.default", args=(tensor(0, 4),))
    (found,) = PriceBook(Products(), replace(CPU, hbm_bytes_per_s=1e9), 2).price([priceable(call)])
    assert found.family == "unmodelled"
    assert found.duration_us == pytest.approx(2.016)


class Known:
    """A model whose forecasts are within a factor of e**half_width, 8 times in 10."""

    def __init__(self, half_width: float) -> None:
        self.half_width = half_width

    def covers_kind(self, gpu: Gpu) -> bool:
        return True

    def host_call(self, gpu: str, op: str) -> None:
        return None


@pytest.mark.parametrize("half_width", (0.1, 0.8))
def test_the_interval_widens_by_the_share_of_a_badly_known_family(half_width: float) -> None:
    """An error of 0.1 is less than machines' products differ by, 0.8 is more by what adds up."""

    class Learned(Products):
        models: Mapping[str, Any] = {"gemm": Known(half_width)}

    found = forecast(
        StepCapture(calls=(product(0, 1, 2),)), ParallelPlan(), PriceBook(Learned(), GPU, 0)
    )
    share, machine = found.parts_frac["products"], typical()
    variance = machine.log_deviation(tuple(found.parts_frac.values()), "") ** 2
    variance += share**2 * max(0.0, (half_width / DEVIATES) ** 2 - machine.typical.spread[0] ** 2)
    assert 0 < share < 1
    wide = machine.typical.deviates * variance**0.5
    assert log(found.iteration_us_p90 / found.iteration_us) == pytest.approx(wide)


def test_trainings_without_text_take_longer_in_practice_where_nothing_is_known() -> None:
    """Convolutions on a GPU of which no step was measured; benchmarks are forecast either way."""
    book = PriceBook(Products(), GPU, 0)
    of_text = forecast(StepCapture(calls=(product(0, 1, 2),), tokens=8), ParallelPlan(), book)
    convolves = replace(of_text, tokens_per_s=0.0)

    def convolution(*kernel: int) -> OpCall:
        args = (tensor(3, 4, 3, 8, 8), tensor(4, 8, 3, *kernel))
        return OpCall(op="aten.convolution.default", args=args)

    def told(numbers: Forecast, book: PriceBook, *kernel: int) -> tuple[float, bool]:
        found = as_trained(numbers, book, [product(0, 1, 2), convolution(*(kernel or (1, 3)))])
        return found.in_practice, any("took 1.39 times" in n for n in found.notes)

    assert told(convolves, book) == (IN_PRACTICE, True)
    assert told(of_text, book) == (1.0, False)
    assert told(replace(convolves, tokens_per_s=8.0), book) == (1.0, False)  # images and captions
    assert told(convolves, book, 1) == told(convolves, book, 1, 1) == (1.0, False)  # products
    assert told(convolves, PriceBook(Products(), CPU, 2)) == (1.0, False)
    assert told(convolves, book.on(NONE, known=typical())) == (1.0, False)


CONVOLVES = """
import torch
model = torch.nn.Conv2d(3, 8, 3).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(9):
    y = model(torch.randn(4, 3, 16, 16, device="cuda")).sum()
    {}
"""


def test_plans_and_scripts_that_train_have_what_trainings_take(tmp_path: Path) -> None:
    target = find_target("h100-sxm-80gb")
    for mode, times in (("train", IN_PRACTICE), ("infer", 1.0)):
        asked = predict("resnet-s", gpu="h100-sxm-80gb", batch=2, mode=mode)
        assert asked.in_practice == times
    for rest, times in (("y.backward(); optimizer.step()", IN_PRACTICE), ("", 1.0)):
        program = captured(written(tmp_path, CONVOLVES.format(rest)), gpus=1)
        assert forecast_program(program, target).in_practice == times
