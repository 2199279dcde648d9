"""What messages cost compute beside them, counted by hand."""

from dataclasses import replace
from itertools import product

import pytest
from law_case import Bare
from plan_case import CPU, Flat

from itercast.capture.plan import ParallelPlan
from itercast.compose.machines.contention import Slowdowns, mixed, slowdowns
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.simulate.timeline import Span, Task, simulate_shared
from itercast.microbench.hardware.node import load_node
from itercast.microbench.hardware.spec import Gpu, load_gpu

A100, H100 = load_gpu("a100-sxm-80gb"), load_gpu("h100-sxm-80gb")
SHARED = {"compute": "gpu", "comm": "gpu"}


def between(gpu: Gpu, rate: float, planned: int = 0) -> Slowdowns:
    """Slowdowns by a message between nodes, which are counted alone."""
    return slowdowns(gpu, rate, in_node=False, planned_sms=planned)


def test_messages_hold_sms_and_memory_bandwidth() -> None:
    """Of 240e9 bytes/s on an A100 24 channels, of 360e9 on an H100 24, which count as 48 SMs.

    108 / 60 and 132 / 84. Seen beside an all_gather: 1.76 and 1.83 on A100 (NCCL's issue 1428), 1.7
    on H100. Memory moves three times as many bytes: 0.72 of 2.039e12 and 1.08 of 3.35e12 a second.
    """
    assert between(A100, 240e9) == pytest.approx((108 / 60, 1 / (1 - 720 / 2039)))
    assert between(A100, 240e9)[0] == pytest.approx((1.76 + 1.83) / 2, rel=0.01)
    assert between(H100, 360e9) == pytest.approx((132 / 84, 1 / (1 - 1080 / 3350)))
    assert between(H100, 360e9)[0] == pytest.approx(1.7, rel=0.1)


def test_within_a_node_a_message_costs_what_training_showed() -> None:
    """arXiv 2507.03114: compute takes 18.9 % longer; one after the other takes 10.2 % longer still.

    Messages are then 1.102 * 1.189 - 1 of compute, and run at 1/c beside it: they take c times as
    long, in which compute does 1/c, so that c - 1 of their time is added to compute.
    """
    seen = 1 + 0.189 / (1.102 * 1.189 - 1)
    pcie = slowdowns(A100, 12e9, in_node=True)
    assert pcie == pytest.approx((seen, seen), rel=0.05)
    assert slowdowns(A100, 1e9, in_node=True) == pytest.approx((1.3, 1.3))  # half of it
    assert slowdowns(A100, 240e9, in_node=True) == pytest.approx((108 / 60, 1.6), rel=0.01)
    assert slowdowns(H100, 240e9, in_node=True, planned_sms=16) == between(H100, 240e9, 16)


def test_megatron_leaves_16_of_an_h100s_132_sms_to_messages() -> None:
    """Products have 116 beside all of NVLink, all but 4 beside 60e9 bytes/s; not before Hopper."""
    book = PriceBook(Flat(), H100, 0, stack="megatron-core")
    found = [book.beside(rate, in_node=True) or (0.0, 0.0) for rate in (360e9, 60e9)]
    assert [products for products, _ in found] == pytest.approx([132 / 116, 132 / 128])
    older = PriceBook(Flat(), A100, 0, stack="megatron-core")
    assert older.beside(240e9, in_node=False) == between(A100, 240e9)
    stated = PriceBook(Flat(), replace(A100, contention=1.2), 0)
    assert (stated.beside(240e9, in_node=True), stated.contention) == (None, 1.2)
    assert PriceBook(Flat(), CPU, 1).beside(1e9, in_node=True) is None


def test_a_slower_link_never_slows_compute_more() -> None:
    """No bytes cost nothing; nothing is faster beside a message, nor slower than taking turns."""
    rates = [0.0, 1.0, 1.25e9, 12.5e9, 1e11, 1.1e11, 4e11, 1e12, 1e14]
    for gpu, sms, inside in product((A100, H100, load_gpu("t4")), (0, 4, 16), (True, False)):
        found = [slowdowns(gpu, rate, in_node=inside, planned_sms=sms) for rate in rates]
        assert found[0] == (1, 1)
        assert found[1] == pytest.approx((1, 1))  # no jump
        for kind in (0, 1):
            assert [x[kind] for x in found] == sorted(x[kind] for x in found)
            assert found[-1][kind] <= 2
        assert inside or max(found[2]) < 1.03  # 10 Gbit/s Ethernet
        for frac, beside in product((0, 0.3, 1), found):
            assert min(beside) <= mixed(beside, frac) <= max(beside)


def test_more_sms_for_messages_are_never_faster() -> None:
    """More planned SMs, or as many bytes by slower channels."""
    planned = [between(H100, 360e9, sms)[0] for sms in (1, 8, 16, 24, 48)]
    assert planned == sorted(planned)
    assert planned[-1] <= between(H100, 360e9)[0]
    assert between(replace(H100, architecture="ampere"), 360e9)[0] > between(H100, 360e9)[0]


def test_rates_of_messages_are_those_over_each_ranks_link() -> None:
    """An all_reduce of 1 GiB among eight takes 2**20 us here and moves 2 * 7/8 GiB."""
    gpu = replace(A100, name="known")
    cluster = cluster_for(ParallelPlan.parse("dp=8"), gpu)
    message = Message(kind="all_reduce", axis="shard", message_bytes=2**30)
    (sent,) = price_messages([message], PriceBook(Flat(), gpu, 0), cluster)
    assert sent.beside == slowdowns(gpu, 1.75 * 2**30 / 2**20 * 1e6, in_node=True)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "send_recv", "all_to_all"])
def test_messages_over_a_network_cost_less_than_those_within_a_node(kind: str) -> None:
    node, found = load_node("p3-16xlarge"), list[float]()
    gpu = load_gpu(node.gpu)
    for axis, text in (("shard", "dp=8"), ("shard", "dp=16,node=n")):
        cluster = cluster_for(ParallelPlan.parse(text), gpu, node)
        message = Message(kind=kind, axis=axis, message_bytes=2**28)
        (sent,) = price_messages([message], PriceBook(Bare(), gpu, 0), cluster)
        assert sent.beside is not None
        found.append(max(sent.beside))
    inside, outside = found
    assert 1 < outside < 1.06 < inside < 2


def test_a_message_over_more_nodes_costs_compute_no_less() -> None:
    """What compute loses beside all of it, (slowdown - 1) x time, is at least that in one node.

    Of 64 MiB on H100, gathered in 195.3 us in a node and 234.6 us over two, 0.6 of each are lost:
    of the longer one by 0.598 * 195.3 / 234.6 = 0.498.
    """
    gpu, node = load_gpu("h100-sxm-80gb"), load_node("dgx-h100")
    for kind, nbytes in product(("all_reduce", "all_gather", "all_to_all"), (2**20, 2**26, 2**30)):
        message, lost = Message(kind=kind, axis="shard", message_bytes=nbytes), list[Slowdowns]()
        for ranks in (8, 16, 64, 512):
            cluster = cluster_for(ParallelPlan(dp=ranks), gpu, node)
            (sent,) = price_messages([message], PriceBook(Bare(), gpu, 0), cluster)
            assert sent.beside is not None
            products, memory = ((slower - 1) * sent.duration_us for slower in sent.beside)
            lost.append((products, memory))
            if (kind, nbytes, ranks) == ("all_gather", 2**26, 16):
                assert sent.beside == pytest.approx((1.498, 1.498), abs=0.001)
        for at in (0, 1):
            assert all(more[at] >= lost[0][at] * (1 - 1e-9) for more in lost)


def test_compute_is_slowed_by_its_share_of_products() -> None:
    #  compute |====8====|          half of it in products
    #  comm    |=4=|                slows products by 1.5, other kernels by 2
    #  compute |==7==|==4==|        1.75 on average: comm takes 7, in which compute does 4
    compute = Task(("compute",), 8, products_frac=0.5)
    message = Task(("comm",), 4, beside=(1.5, 2.0))
    assert simulate_shared([compute, message], SHARED, 1) == [Span(0, 11), Span(0, 7)]
    alike = [message, replace(message, lanes=("compute",))]
    assert simulate_shared(alike, SHARED, 2) == [Span(0, 8), Span(0, 8)]
