"""What collectives send over links and networks, and groups of ranks: counted by hand."""

import os
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from typing import Any

import numpy as np
import pytest

from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops.step import _wrappers as wrappers
from itercast.microbench.ops.step.alpha_beta import (
    NEIGHBOURS,
    TO_ALL,
    floor_us,
    link_rate,
    network_us,
    ring_network_us,
)
from itercast.microbench.ops.step.collective import FAMILY, OPS, Collective, features

MIB = 2**20
H100, A100 = load_gpu("h100-sxm-80gb"), load_gpu("a100-sxm-80gb")
B200 = load_gpu("b200-sxm")
BRIDGED = load_gpu("a100-pcie-80gb")  # its bridges are sold apart
RTX = load_gpu("rtx-pro-6000")
CPU = replace(H100, kind="cpu", sm_count=2, hbm_bytes_per_s=8e9)


def across(op: str, world_size: int = 16, message_bytes: int = 64 * MIB) -> Collective:
    """Nodes of eight GPUs with 25e9 bytes/s of network each: 200e9 bytes/s a node."""
    sizes = {"world_size": world_size, "message_bytes": message_bytes, "ranks_per_node": 8}
    return Collective(op=op, network_bytes_per_s=25e9, **sizes)


def within(op: str, message_bytes: int = 2**30, ranks: int = 8, **more: Any) -> Collective:
    sizes = {"world_size": ranks, "message_bytes": message_bytes, "ranks_per_node": ranks}
    return Collective(op=op, **sizes, **more)


HALF_US = 64 * MIB / 2 / (25e9 * 0.96) * 1e6  # of 64 MiB over 96 % of a NIC
SWAP_US = 64 * MIB / (200e9 * 0.96) * 1e6  # all of it, over eight NICs
TREE_US = 2 * (7 * 1.25 + 6 * 8.5)
TREE_BYTES_US = 2 * 63 / 64 * MIB / (200e9 * 0.96 * 0.846) * 1e6
NVLINK_US = 2**30 / (0.8 * 450e9) * 1e6
PAIR = within("all_gather", 2 * MIB, ranks=2)
COPIES_US = MIB / 1e9 * 1e6 + 20  # 8 copies of its half, and one step of 20 us
FLOORS: list[tuple[Collective, Gpu, float]] = [
    # eight ranks: 8.4 us, seven steps of 3.4 us, 7/8 of the bytes
    (within("all_gather"), H100, 8.4 + 7 * 3.4 + 7 / 8 * NVLINK_US),
    # the protocol of least latency: a ring with ll, 6.6 us and 2 steps of 0.6 us
    (within("all_reduce", 8, ranks=2), H100, 6.6 + 2 * 0.6),
    # switches of Hopper add up: each GPU sends and receives the message once, at 5/6 of the rate;
    # the first piece goes there and back alone
    (within("all_reduce"), H100, 25 + NVLINK_US * 6 / 5 + 2 * (25 * NVLINK_US * 6 / 5) ** 0.5),
    (within("all_reduce", ranks=2), H100, 8.4 + 2 * 3.4 + NVLINK_US),  # two ranks do not
    # 14 steps inside nodes and one between are simple; the network is the slower
    (across("all_gather"), H100, 8.4 + 14 * 3.4 + 14 + 15 / 16 * 2 * HALF_US / 8),
    # both halves of a ring
    (across("all_reduce"), A100, 8.4 + 2 * (14 * 3.4 + 14) + 15 / 8 * 2 * HALF_US / 8),
    # over 64 nodes a tree with ll128: seven steps inside, log2(64) = 6 between, both ways; 0.846
    # of the network's rate; pieces fill its steps
    (
        across("all_reduce", 512, MIB),
        A100,
        14 + TREE_US + TREE_BYTES_US + 2 * (TREE_US * TREE_BYTES_US) ** 0.5,
    ),
    # what the switches of a node pass on at 5/6 of the rate is sent on at the network's own
    (across("all_reduce"), B200, 53 + SWAP_US + 2 * (53 * SWAP_US) ** 0.5),
    # to seven peers of the node, and a message to the other, for which half the bytes are, over the
    # rank's own network card; kernels of experts signal any number of nodes at once
    *((across(op), H100, 8.4 + 7 * 3.4 + 14 + HALF_US) for op in TO_ALL),
    (across("all_to_all", 32), H100, 8.4 + 7 * 3.4 + 3 * 14 + 1.5 * HALF_US),
    (across("moe_combine", 32), H100, 8.4 + 7 * 3.4 + 14 + 1.5 * HALF_US),
    (within("moe_dispatch", 8), H100, 8.4 + 7 * 3.4),
    # one card; nobody states the network: 25e9 bytes/s
    (
        Collective(op="send_recv", message_bytes=64 * MIB, ranks_per_node=1),
        H100,
        8.4 + 14 + 2 * HALF_US,
    ),
    # PCIe takes no protocol of NVLink; both ways at once halve its rate, pairs with bridges do not
    *(
        (
            within("all_gather", MIB, ranks=2, link=link),
            RTX,
            8.4 + 5.7 + MIB / 2 / (RTX.pcie_bytes_per_s * share) * 1e6,
        )
        for link, share in (("pcie", 0.38), ("bridged", 0.76))
    ),
    # both ways over links of GPUs as one way; on a CPU one way is half the copies
    *((within(op, 2**30, ranks=2), H100, 8.4 + 3.4 + NVLINK_US) for op in NEIGHBOURS),
    (within("exchange", MIB, ranks=2), CPU, COPIES_US),
    (within("send_recv", MIB, ranks=2), CPU, COPIES_US / 2 + 10),
    # two pairs on two cores take turns; on four cores each has its own
    (PAIR, CPU, COPIES_US),
    (replace(PAIR, ranks_per_node=4), CPU, 2 * COPIES_US),
    (replace(PAIR, ranks_per_node=4), replace(CPU, sm_count=4), COPIES_US),
]


@pytest.mark.parametrize(("p", "gpu", "us"), FLOORS)
def test_times_by_hand(p: Collective, gpu: Gpu, us: float) -> None:
    assert float(floor_us(p, gpu)) == pytest.approx(us, rel=1e-4)


def test_an_all_reduce_adds_up_within_nodes_before_it_leaves_them() -> None:
    """Two nodes swap the whole sum, 2 (N-1)/N of it each way; a gather rings through all ranks."""
    whole_us = 64 * MIB / 200e9 * 1e6
    assert float(network_us(across("all_reduce"))) == pytest.approx(whole_us)
    assert float(network_us(across("all_reduce", 32))) == pytest.approx(1.5 * whole_us)
    assert float(network_us(across("all_gather"))) == pytest.approx(15 / 16 * whole_us)
    assert float(ring_network_us(across("all_reduce"))) == pytest.approx(15 / 8 * whole_us)


def test_features_name_link_pattern_and_the_slower_of_link_and_network() -> None:
    """An H100's links do 450e9 bytes/s, eight shares of the network 200e9.

    PCIe 4.0, 31.5e9 bytes/s, is the usual link of cards whose bridges are sold apart.
    A ring of bridged pairs goes at its rate, but what is learned of one is not said of the other.
    """
    assert float(features(across("all_gather"), H100)["log_bus_rate"]) == np.log2(200e9 / 1e6)
    near = features(within("all_gather", MIB, ranks=2), H100)
    assert float(near["log_bus_rate"]) == pytest.approx(np.log2(450e9 / 1e6))
    assert float(near["log_bus_us"]) == pytest.approx(np.log2(MIB / 2 / 450e9 * 1e6))
    asked = [within("all_gather", MIB, ranks=2, link=x) for x in ("", "pairwise", "bridged")]
    rates = [float(link_rate(p, BRIDGED)) for p in asked]
    assert rates == [31.5e9, BRIDGED.link_bytes_per_s, 31.5e9]
    links = [str(features(p, BRIDGED)["link"]) for p in asked]
    assert links == ["pcie", "pairwise", "bridged"]
    ops = ("all_gather", "reduce_scatter", "all_reduce", "moe_combine")
    patterns = [str(features(within(op), H100)["pattern"]) for op in ops]
    assert patterns == ["half", "half", "all_reduce", "experts"]
    beside = [
        float(features(p, CPU)["log_beside"]) for p in (PAIR, replace(PAIR, ranks_per_node=4))
    ]
    assert beside == [0, 1]


def test_a_sweep_sums_fp16_gradients_too() -> None:
    """On a CPU half the bytes are no faster to add: plans that compress ask for their own times."""
    found = {(p.op, p.dtype) for p in islice(FAMILY.sweep(), 200)}
    assert {op for op, dtype in found if dtype == "fp16"} == {"all_reduce"}
    assert ("all_reduce", "fp32") in found


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("local", [1, 8])
def test_more_bytes_more_nodes_and_slower_networks_are_never_faster(op: str, local: int) -> None:
    def us(nodes: int = 2, message_bytes: int = 2**24, rate: float = 25e9) -> float:
        p = replace(across(op, nodes * local, message_bytes), ranks_per_node=local)
        return float(floor_us(replace(p, network_bytes_per_s=rate), H100))

    times = [us(message_bytes=2**k) for k in range(3, 34)]
    assert times == sorted(times)
    assert [us(n) for n in (2, 4, 8, 64)] == sorted(us(n) for n in (2, 4, 8, 64))
    assert us(rate=50e9) <= us(rate=25e9) <= us(rate=6.25e9)


def test_a_rack_of_one_link_domain_does_not_cross_the_network() -> None:
    """64 ranks of a domain of 72 are faster than 16 hosts of four, though both are 64 GPUs."""
    asked = [replace(within("all_gather", ranks=64), ranks_per_node=n) for n in (64, 4)]
    rack_us, hosts_us = (float(floor_us(p, load_gpu("gb200"))) for p in asked)
    assert float(network_us(asked[0])) == 0.0
    assert rack_us < hosts_us / 5  # 900e9 * 0.8 bytes/s against 4 * 25e9 * 0.96


def test_stated_links_count() -> None:
    half, whole = (within("all_gather", ranks=2, link_bytes_per_s=r) for r in (225e9, 450e9))
    assert float(floor_us(half, H100) / floor_us(whole, H100)) == pytest.approx(2, rel=0.02)


def test_nccl_alone_looks_for_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a box without one it would wait for minutes; if it still waits, then not for long."""
    asked: dict[str, Any] = {}
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    monkeypatch.setattr(wrappers.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(
        wrappers.dist, "init_process_group", lambda backend, **more: asked.update(more, b=backend)
    )
    monkeypatch.setitem(wrappers.WRAPPERS, "toy", (lambda tensors, device: (print, print), 1))
    wrappers.wrapper_workload("toy", 1, "cuda")
    assert (asked["b"], asked["world_size"]) == ("nccl", 1)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert asked["timeout"] <= timedelta(seconds=30)
