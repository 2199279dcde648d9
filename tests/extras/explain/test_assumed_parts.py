"""Time that rests on assumed numbers, counted by hand: ``assumed_frac`` and what explains it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from plan_case import Fixed, tensor

from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import Forecast, forecast
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing.collectives import Message, formula_us, price_messages
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import Priceable
from itercast.extras.explain.assumed import assumed_parts, print_parts
from itercast.microbench.hardware.node import Node
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.matrix.gemm import FAMILY as GEMM
from itercast.microbench.ops.matrix.gemm import Gemm

GPU = Gpu(
    name="toy-gpu",
    peak_flops_per_s={"fp32": 1e12},
    l2_bytes=1e12,
    hbm_bytes_per_s=1e9,
    link_bytes_per_s=1e11,
    pcie_bytes_per_s=1e10,
)
CPU = Gpu(
    name="toy",
    kind="cpu",
    sm_count=2,
    peak_flops_per_s={"fp32": 1e12},
    l2_bytes=1e12,
    hbm_bytes_per_s=1e9,
)


class Products(Fixed):
    """Knows products alone: 10 us each, collectives of up to four ranks where asked for."""

    models: Mapping[str, Any] = {"gemm": None}

    def inside(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> list[bool]:
        return [bool(n <= 4) for n in rows["world_size"]]


class ProductsAndHost(Products):
    """Knows the host as well: 10 us an event."""

    models: Mapping[str, Any] = {"gemm": None, "host": None}


class ProductsAndMessages(Products):
    models: Mapping[str, Any] = {"gemm": None, "collective": None}


def product() -> OpCall:
    a, b, c = (tensor(i, 10, 10) for i in range(3))
    return OpCall(op="aten.mm.default", args=(a, b), outputs=(c,))


def unknown() -> OpCall:
    """Reads 16 bytes; no family answers for it."""
    return OpCall(op="aten.unheard_of.default", args=(tensor(9, 4),))


def of(step: StepCapture, gpu: Gpu, pricer: Products) -> Forecast:
    return forecast(step, ParallelPlan(), PriceBook(pricer, gpu, 2))


def test_the_host_of_a_gpu_counts_where_compute_waits_for_it() -> None:
    #  host    |-5-|-5-|
    #  compute     |=10=|=10=|
    found = of(StepCapture(calls=(product(), product())), GPU, Products())
    assert found.iteration_us == pytest.approx(5 + 20)
    assert found.assumed_by_us == {"host.event_us.launch": pytest.approx(5)}
    assert found.assumed_frac == pytest.approx(5 / 25)
    assert found.unmodelled_frac == 0


def test_a_gap_is_shared_by_what_the_host_does() -> None:
    """Two module calls of 3 us over two ops: each costs the host 3 us of Python and 5 us."""
    step = StepCapture(calls=(product(), product()), host={"module_call": 2})
    found = of(step, GPU, Products())
    assert found.iteration_us == pytest.approx(8 + 20)  # 8 us of gaps
    assert found.assumed_by_us == {
        "host.event_us.launch": pytest.approx(5),
        "host.event_us.module_call": pytest.approx(3),
    }
    assert of(step, GPU, ProductsAndHost()).assumed_frac == 0


def test_every_part_is_explained_with_value_and_source() -> None:
    step = StepCapture(calls=(product(), unknown()), host={"module_call": 2})
    found = of(step, CPU, Products())
    module, roofline = assumed_parts(found)
    assert (module.name, module.value) == ("host.event_us.module_call", "3.0")
    assert (roofline.name, roofline.value) == ("price_book.roofline_overhead_us", "2.0")
    assert module.time_us + roofline.time_us == pytest.approx(6 + 2.016)
    assert module.iteration_frac + roofline.iteration_frac == pytest.approx(found.assumed_frac)
    assert all(part.source and part.unit and part.holds for part in (module, roofline))


def test_a_forecast_without_assumed_numbers_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_parts(of(StepCapture(calls=(product(),)), GPU, ProductsAndHost()))
    assert capsys.readouterr().out == "no assumed number decides this forecast\n"


def test_experts_priced_one_by_one_are_a_fallback() -> None:
    """Without a kernel for all experts: four products of 10 us."""
    from unseen_ops import learned

    pricer = Products()
    pricer.models = {"gemm": learned("mm")}
    experts = Gemm(op="grouped_mm", batch=4, m=8, n=8, k=8)
    wanted = Priceable(
        op="x", phase="forward", family=GEMM, params=experts, bytes_moved=0.0, cold=0.0
    )
    (op,) = PriceBook(pricer, GPU, 0).price([wanted])
    assert op.duration_us == pytest.approx(40)
    assert op.assumed == (("fallbacks.gemm", 1.0),)


def sent(ranks: int, pricer: Products, node: Node | None = None) -> tuple[Any, float]:
    """An all_reduce of 100 MB over so many ranks, and ``formula_us`` of it over that of four."""
    cluster = cluster_for(ParallelPlan(dp=ranks), GPU, node)
    message = Message(kind="all_reduce", axis="dp", message_bytes=10**8)
    (op,) = price_messages([message], PriceBook(pricer, GPU, 0), cluster)
    group = cluster.groups["dp"]
    four = replace(group, size=4, per_node=4)
    return op, formula_us(message, group, cluster) / formula_us(message, four, cluster)


def test_of_a_collective_what_no_row_says_is_assumed() -> None:
    """All without a model; beyond the measured group what scaling adds; an unknown network, all."""
    assert sent(4, Products())[0].assumed == (("alpha_beta.step_us", 1.0),)
    assert sent(4, ProductsAndMessages())[0].assumed == ()
    scaled, ratio = sent(8, ProductsAndMessages())
    assert scaled.duration_us == pytest.approx(10 * ratio)
    assert scaled.assumed == (("alpha_beta.step_us", pytest.approx(1 - 1 / ratio)),)
    unstated, _ = sent(16, ProductsAndMessages())
    assert unstated.assumed == (("alpha_beta.network_bytes_per_s", 1.0),)
    node = Node(
        name="n",
        gpu=GPU.name,
        gpus_per_node=8,
        topology="nvswitch",
        link_bytes_per_s=1e11,
        network_bytes_per_s=5e10,
    )
    stated, ratio = sent(16, ProductsAndMessages(), node)
    assert stated.assumed == (("alpha_beta.step_us", pytest.approx(1 - 1 / ratio)),)
