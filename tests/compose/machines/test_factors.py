"""Factors of a machine: what each of them makes longer, counted by hand."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import pytest
from plan_case import Fixed, call, tensor

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import forecast
from itercast.compose.machines.factors import NONE, Factors
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.price_book import PriceBook
from itercast.microbench.hardware.spec import Gpu

CPU = Gpu(name="toy", kind="cpu", sm_count=2, peak_flops_per_s={"fp32": 1e12}, l2_bytes=4000)
GPU = Gpu(name="toy", kind="gpu", sm_count=2, peak_flops_per_s={"fp32": 1e12}, l2_bytes=4000)


class Tens(Fixed):
    """A product takes 10 us, a pass over memory 4."""

    models: Mapping[str, Any] = {"gemm": None, "elementwise": None}

    def us(self, family: str, rows: pd.DataFrame) -> Any:
        return 10.0 if family == "gemm" else 4.0


def step() -> StepCapture:
    """A product and an addition, with an event of Python of 3 us."""
    product = call("mm.default", [tensor(0, 10, 10), tensor(1, 10, 10)], tensor(2, 10, 10))
    add = call("add.Tensor", [tensor(2, 10, 10), tensor(0, 10, 10)], tensor(3, 10, 10))
    return StepCapture(calls=(product, add), host={"module_call": 1}, optimizer="adamw")


@pytest.mark.parametrize(
    ("machine", "us"),
    [
        (NONE, 10 + 4 + 3),
        (Factors(products=2.0), 20 + 4 + 3),
        (Factors(memory=1.5), 10 + 6 + 3),
        (Factors(host=3.0), 10 + 4 + 9),
        (Factors(links=9.0, network=9.0), 17),  # nothing is sent
    ],
)
def test_a_factor_scales_its_part(machine: Factors, us: float) -> None:
    book = PriceBook(Tens(), CPU, 2).on(machine)
    assert forecast(step(), ParallelPlan(), book).iteration_us == pytest.approx(us)


def test_books_of_two_machines_ask_models_once() -> None:
    book = PriceBook(Tens(), CPU, 2)
    assert book.on(NONE) is book
    slow = book.on(Factors(products=2.0))
    assert slow is book.on(Factors(products=2.0))
    assert slow.prices is book.prices


def test_messages_take_the_factor_of_what_they_cross() -> None:
    """8 ranks of a node cross links, 16 on two nodes the network."""
    machine = Factors(links=2.0, network=3.0)
    assert machine.of_message(8, 8) == 2
    assert machine.of_message(16, 8) == machine.of_message(64, 8) == 3
    message = Message(kind="all_reduce", axis="world", message_bytes=2**20, dtype="fp32")
    for ranks, factor in ((8, 2.0), (16, 3.0)):
        cluster = cluster_for(ParallelPlan(dp=ranks), GPU, None)
        book = PriceBook(Tens(), GPU, 0)
        (plain,), (slow,) = (
            price_messages([message], x, cluster) for x in (book, book.on(machine))
        )
        assert slow.duration_us == pytest.approx(factor * plain.duration_us)


def test_factors_are_positive() -> None:
    with pytest.raises(ValueError, match="factors of a machine are positive"):
        Factors(host=0.0)
    assert Factors.of_logs(Factors(host=2.0).logs).host == pytest.approx(2.0)
