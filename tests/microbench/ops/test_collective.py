"""What collectives send over links and networks, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops.step.alpha_beta import (
    LINK_SHARE,
    PROTOCOL_SHARE,
    START_US,
    STEP_US,
    floor_us,
    link_rate,
    network_us,
    ring_network_us,
)
from itercast.microbench.ops.step.collective import OPS, Collective, features, sweep

MIB = 2**20
H100 = load_gpu("h100-sxm-80gb")


def across(op: str, world_size: int = 16) -> Collective:
    """Nodes of eight GPUs with 25e9 bytes/s of network each: 200e9 bytes/s a node."""
    return Collective(
        op=op,
        message_bytes=64 * MIB,
        world_size=world_size,
        ranks_per_node=8,
        network_bytes_per_s=25e9,
    )


def test_an_all_reduce_adds_up_within_nodes_before_it_leaves_them() -> None:
    """Two nodes swap the whole sum, 2 (N-1)/N of it each way; a gather rings through all ranks."""
    whole_us = 64 * MIB / 200e9 * 1e6
    assert float(network_us(across("all_reduce"))) == pytest.approx(whole_us)
    assert float(network_us(across("all_reduce", 32))) == pytest.approx(1.5 * whole_us)
    assert float(network_us(across("all_gather"))) == pytest.approx(15 / 16 * whole_us)


def test_features_name_the_slower_of_link_and_network() -> None:
    """An H100's links do 450e9 bytes/s, eight shares of the network 200e9."""
    gpu = load_gpu("h100-sxm-80gb")
    far = features(across("all_gather"), gpu)
    assert float(far["log_bus_rate"]) == pytest.approx(np.log2(200e9 / 1e6))
    near = features(Collective(op="all_gather", message_bytes=MIB), gpu)
    assert float(near["log_bus_rate"]) == pytest.approx(np.log2(450e9 / 1e6))
    assert float(near["log_bus_us"]) == pytest.approx(np.log2(MIB / 2 / 450e9 * 1e6))


def test_what_does_not_say_its_link_takes_the_usual_one() -> None:
    """Cards whose bridges are sold apart talk over PCIe 4.0: 16 lanes of 16 Gb/s, 128b/130b."""
    gpu, pcie = load_gpu("a100-pcie-80gb"), 31.5e9
    asked = [Collective(op="all_gather", message_bytes=MIB, link=x) for x in ("", "pairwise")]
    assert [float(link_rate(p, gpu)) for p in asked] == [pcie, gpu.link_bytes_per_s]
    assert [str(features(p, gpu)["link"]) for p in asked] == ["pcie", "pairwise"]


def test_a_ring_of_bridged_pairs_goes_at_the_rate_of_pcie() -> None:
    """By formula as over PCIe, but what is learned of one kind of ring is not said of the other."""
    gpu, four = load_gpu("a100-pcie-80gb"), {"world_size": 4, "ranks_per_node": 4}
    pcie = replace(Collective(op="all_reduce", message_bytes=MIB, link="pcie"), **four)
    kinds = [pcie, replace(pcie, link="bridged")]
    assert float(floor_us(kinds[0], gpu)) == float(floor_us(kinds[1], gpu))
    assert float(link_rate(kinds[1], gpu)) == 31.5e9
    assert [str(features(p, gpu)["link"]) for p in kinds] == ["pcie", "bridged"]


def test_groups_that_share_the_cores_of_a_cpu_take_turns() -> None:
    """Two pairs on two cores take twice as long as one; on four cores each has its own."""
    cpu = replace(load_gpu("h100-sxm-80gb"), kind="cpu", sm_count=2, hbm_bytes_per_s=8e9)
    pair = Collective(op="all_gather", message_bytes=2 * MIB)
    pairs = replace(pair, ranks_per_node=4)
    alone_us = MIB / 1e9 * 1e6 + 20  # 8 copies of its half, and one step of 20 us
    assert float(floor_us(pair, cpu)) == pytest.approx(alone_us)
    assert float(floor_us(pairs, cpu)) == pytest.approx(2 * alone_us)
    assert float(floor_us(pairs, replace(cpu, sm_count=4))) == pytest.approx(alone_us)
    beside = [float(features(p, cpu)["log_beside"]) for p in (pair, pairs)]
    assert beside == [0, 1]


def test_gather_and_scatter_are_one_pattern() -> None:
    ops = ("all_gather", "reduce_scatter", "all_reduce")
    gpu = load_gpu("h100-sxm-80gb")
    found = [str(features(Collective(op=op, message_bytes=MIB), gpu)["pattern"]) for op in ops]
    assert found == ["half", "half", "all_reduce"]


def test_a_sweep_sums_fp16_gradients_too() -> None:
    """On a CPU half the bytes are no faster to add: plans that compress ask for their own times."""
    found = {(p.op, p.dtype) for p in islice(sweep(), 200)}
    assert {op for op, dtype in found if dtype == "fp16"} == {"all_reduce"}
    assert ("all_reduce", "fp32") in found


def test_a_large_gather_inside_a_node_is_latency_plus_bytes_over_nvlink() -> None:
    """Eight ranks: 8.4 us, seven steps of 3.4 us, 7/8 of 1 GiB at 0.8 * 450e9 bytes/s."""
    gather = Collective(op="all_gather", message_bytes=2**30, world_size=8, ranks_per_node=8)
    bytes_us = 7 / 8 * 2**30 / (0.8 * 450e9) * 1e6
    assert float(floor_us(gather, H100)) == pytest.approx(8.4 + 7 * 3.4 + bytes_us)


def test_a_small_message_takes_the_protocol_of_least_latency() -> None:
    """A ring of 8 B among two ranks with ll: 6.6 us and 2 steps of 0.6 us for an all_reduce."""
    small = Collective(op="all_reduce", message_bytes=8, world_size=2)
    assert float(floor_us(small, H100)) == pytest.approx(6.6 + 2 * 0.6, rel=1e-4)


def test_across_nodes_a_gather_rings_and_an_all_reduce_takes_a_tree() -> None:
    """64 MiB over two nodes of eight: 96 % of a NIC of 25e9 bytes/s a GPU.

    The gather's 14 steps inside nodes and one between are simple. The tree, seven steps inside and
    one between, both ways, is bound by an A100's links: 15/8 of the bytes at 0.8 * 0.92 * 300e9.
    """
    gather, reduces = across("all_gather"), across("all_reduce")
    ring_us = 15 / 16 * 64 * MIB / (8 * 25e9 * 0.96) * 1e6
    assert float(floor_us(gather, H100)) == pytest.approx(8.4 + 14 * 3.4 + 14 + ring_us)
    tree_us = 8.4 + 2 * (7 * 4 + 14) + 15 / 8 * 64 * MIB / (0.8 * 0.92 * 300e9) * 1e6
    assert float(floor_us(reduces, load_gpu("a100-sxm-80gb"))) == pytest.approx(tree_us)


@pytest.mark.parametrize("op", ["all_to_all", "moe_dispatch", "moe_combine"])
def test_what_each_rank_has_for_each_other_one_goes_over_its_own_network_card(op: str) -> None:
    """One step, whatever the ranks: half of 64 MiB is for the other node."""
    us = 64 * MIB / 2 / (25e9 * 0.96) * 1e6
    assert float(floor_us(across(op), H100)) == pytest.approx(8.4 + 14 + us)


def test_send_recv_has_one_network_card() -> None:
    pair = Collective(op="send_recv", message_bytes=64 * MIB, ranks_per_node=1)
    us = 64 * MIB / (25e9 * 0.96) * 1e6  # nobody states the network: 25e9 bytes/s
    assert float(floor_us(pair, H100)) == pytest.approx(8.4 + 14 + us)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("local", [1, 8])
def test_more_bytes_more_nodes_and_slower_networks_are_never_faster(op: str, local: int) -> None:
    def us(nodes: int = 2, message_bytes: int = 2**24, rate: float = 25e9) -> float:
        size = {"world_size": nodes * local, "ranks_per_node": local}
        p = Collective(op=op, message_bytes=message_bytes, network_bytes_per_s=rate, **size)
        return float(floor_us(p, H100))

    times = [us(message_bytes=2**k) for k in range(3, 34)]
    assert times == sorted(times)
    assert [us(n) for n in (2, 4, 8, 64)] == sorted(us(n) for n in (2, 4, 8, 64))
    assert us(rate=50e9) <= us(rate=25e9) <= us(rate=6.25e9)


def test_a_rack_of_one_link_domain_does_not_cross_the_network() -> None:
    """64 ranks of a domain of 72 are faster than 16 hosts of four, though both are 64 GPUs."""
    gpu = load_gpu("gb200")
    asked = [
        Collective(op="all_gather", message_bytes=2**30, world_size=64, ranks_per_node=n)
        for n in (64, 4)
    ]
    rack_us, hosts_us = (float(floor_us(p, gpu)) for p in asked)
    assert float(network_us(asked[0])) == 0.0
    assert rack_us < hosts_us / 5  # 900e9 * 0.8 bytes/s against 4 * 25e9 * 0.96


def test_pcie_takes_no_protocol_of_nvlink_and_stated_links_count() -> None:
    gpu = load_gpu("rtx-pro-6000")
    pair = Collective(op="all_gather", message_bytes=2**20, link="pcie")
    bytes_us = 2**19 / (gpu.pcie_bytes_per_s * 0.76) * 1e6
    assert float(floor_us(pair, gpu)) == pytest.approx(8.4 + 5.7 + bytes_us)
    half = Collective(op="all_gather", message_bytes=2**30, link_bytes_per_s=225e9)
    whole = Collective(op="all_gather", message_bytes=2**30)
    assert float(floor_us(half, H100) / floor_us(whole, H100)) == pytest.approx(2, rel=0.02)


def test_a_ring_sends_more_over_the_network_than_a_tree() -> None:
    """15/8 of the message against once, over two nodes of eight."""
    ring, tree = ring_network_us(across("all_reduce")), network_us(across("all_reduce"))
    assert float(ring / tree) == pytest.approx(15 / 8)


def test_every_algorithm_has_the_same_protocols_and_links() -> None:
    for algorithm, shares in PROTOCOL_SHARE.items():
        assert set(START_US[algorithm]) == set(shares)
        assert set(STEP_US[algorithm]) == set(LINK_SHARE)
        assert all(set(steps) == set(shares) for steps in STEP_US[algorithm].values())


def test_switches_of_hopper_add_up_an_all_reduce() -> None:
    """Each GPU sends and receives 1 GiB once, at 5/6 of 0.8 * 450e9 bytes/s; two ranks do not."""
    p = Collective(op="all_reduce", message_bytes=2**30, world_size=8, ranks_per_node=8)
    us = 25 + 2**30 / (0.8 * 450e9 * 5 / 6) * 1e6
    assert float(floor_us(p, H100)) == pytest.approx(us)
    assert float(floor_us(p, load_gpu("a100-sxm-80gb"))) > us * 450 / 300  # rings and trees alone
    pair = Collective(op="all_reduce", message_bytes=2**30, world_size=2)
    assert float(floor_us(pair, H100)) == pytest.approx(8.4 + 2 * 3.4 + 2**30 / (0.8 * 450e9) * 1e6)
