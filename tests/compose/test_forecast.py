"""Forecasts by hand, from a pricer that knows one price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp
from typing import Any

import pandas as pd
import pytest
from plan_case import Fixed, tensor

from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import HALF_WIDTH, forecast
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import priceable
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
