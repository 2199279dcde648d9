"""What collectives send over links and networks, counted by hand."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from microbench.hardware.spec import load_gpu
from microbench.ops.step.collective import Collective, features, link_rate, network_us, sweep

MIB = 2**20


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
