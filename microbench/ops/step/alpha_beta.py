"""Time of a collective by formula: latency of its steps plus bytes over the rate of its links.

On a GPU it is the time of NCCL's fastest algorithm and protocol, estimated as NCCL does to choose
one (https://github.com/NVIDIA/nccl, src/graph/tuning.cc). ``ranks_per_node`` separates link domains
from the network; rates are those of hardware and node files. Learned models correct the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Point, Values

HALVES = ("all_gather", "reduce_scatter")  # each half of an all_reduce's steps
EXPERTS = ("moe_dispatch", "moe_combine")  # by kernels of experts, not by NCCL
TO_ALL = ("all_to_all", *EXPERTS)  # each rank has something for each other
EXCHANGE = "exchange"  # each rank sends to the next one, and receives as much from the one before
NEIGHBOURS = ("send_recv", EXCHANGE)  # one way, and both ways at once
NOBODY_WAITS = ("broadcast", "send_recv")  # who sends waits for none
PAIRS = (*TO_ALL, *NEIGHBOURS)  # sent straight from rank to rank
CPU_COPIES = assumed(__file__, "cpu_copies")
CPU_STEP_US = assumed(__file__, "cpu_step_us")
NETWORK_BYTES_PER_S = assumed(__file__, "network_bytes_per_s")
PCIE_BOTH_WAYS = assumed(__file__, "pcie_both_ways")
START_US = assumed(__file__, "start_us")
STEP_US = assumed(__file__, "step_us")
PROTOCOL_SHARE = assumed(__file__, "protocol_share")
LINK_SHARE = assumed(__file__, "link_share")
SWITCH_US = assumed(__file__, "switch_us")
SWITCH_SHARE = assumed(__file__, "switch_share")
SWITCH_RANKS = assumed(__file__, "switch_ranks")
SWITCHES_ADD = ("hopper", "blackwell", "blackwell-ultra")  # whose NVSwitches add up
NVLINK_ONLY = "ll128"  # a protocol that relies on stores of 128 bytes staying whole


def is_among(values: Values, names: Sequence[str]) -> Values:
    """Whether a name, or each of a column, is one of these; np.isin is slow for a single name."""
    if np.ndim(values) == 0:
        return np.bool_(str(values) in names)
    return np.isin(values, names)


def bus_factor(p: Point) -> Values:
    """busbw / algbw: all_reduce 2(n-1)/n; gather, scatter and all_to_all (n-1)/n; else 1."""
    n = np.asarray(p.world_size, dtype=float)
    share = (n - 1) / n
    one_sender = is_among(p.op, ("broadcast", *NEIGHBOURS))
    return np.where(np.equal(p.op, "all_reduce"), 2 * share, np.where(one_sender, 1.0, share))


def bytes_moved(p: Point) -> Values:
    """Bytes over each rank's link."""
    return bus_factor(p) * p.message_bytes


def across_nodes(p: Point) -> Values:
    """Whether some ranks reach each other only over the network."""
    stated = is_among(p.link, ["nvlink", "pairwise", "bridged", "pcie"])
    return np.greater(p.world_size, p.ranks_per_node) & ~stated


def groups_beside(p: Point) -> Values:
    """Groups of ranks that send at the same time on one CPU, by ``ranks_per_node``."""
    return np.maximum(1, np.asarray(p.ranks_per_node, dtype=float) / p.world_size)


def link(p: Point, gpu: Gpu) -> Values:
    """The slowest kind of link that a collective crosses; the GPU's usual one if not stated."""
    usual = np.where(across_nodes(p), "network", gpu.usual_link)
    return np.where(np.equal(p.link, ""), usual, p.link)


def link_inside(p: Point, gpu: Gpu) -> Values:
    """The slowest kind of link among ranks of a node; the group may have several nodes."""
    kind = link(p, gpu)
    return np.where(np.equal(kind, "network"), gpu.usual_link, kind)


def over_pcie(p: Point, gpu: Gpu) -> Values:
    """Whether ranks of a node reach each other over PCIe."""
    return is_among(link_inside(p, gpu), ["pcie", "bridged"])


def link_rate(p: Point, gpu: Gpu) -> Values:
    """Bytes/s in one direction of the links inside a node: as stated, else the GPU's own."""
    fast = gpu.link_bytes_per_s or gpu.pcie_bytes_per_s or NETWORK_BYTES_PER_S
    usual = np.where(over_pcie(p, gpu), gpu.pcie_bytes_per_s or fast, fast)
    return np.where(np.greater(p.link_bytes_per_s, 0), p.link_bytes_per_s, usual)


def link_us(p: Point, gpu: Gpu) -> Values:
    """Time of the bytes over the links inside a node."""
    alone = np.equal(p.ranks_per_node, 1) & across_nodes(p)
    return np.where(alone, 0.0, bytes_moved(p) / link_rate(p, gpu) * 1e6)


def network_rate(p: Point) -> Values:
    """A GPU's share of the network in bytes/s: that stated, else the usual one."""
    rate = np.asarray(p.network_bytes_per_s, dtype=float)
    return np.where(rate > 0, rate, NETWORK_BYTES_PER_S)


def ring_network_us(p: Point) -> Values:
    """Time of a message's bytes on the network, in us; 0 within a node.

    In a ring all GPUs of a node share the bytes that leave it, over all its NICs. In an all_to_all
    each GPU sends what is for other nodes through its own share of the NICs; in a send_recv it
    sends all bytes there.
    """
    local, world = np.asarray(p.ranks_per_node, dtype=float), np.asarray(p.world_size, dtype=float)
    rate = network_rate(p)
    by_pairs = p.message_bytes * np.maximum(world - local, 0) / world / rate
    seconds = np.where(is_among(p.op, TO_ALL), by_pairs, bytes_moved(p) / (rate * local))
    seconds = np.where(is_among(p.op, NEIGHBOURS), p.message_bytes / rate, seconds)
    return np.where(across_nodes(p), seconds * 1e6, 0.0)


def network_us(p: Point) -> Values:
    """Time of the bytes over the network in us: an all_reduce as a tree, others as a ring.

    A tree adds up within nodes first, so that nodes count, not ranks.
    """
    local, world = np.asarray(p.ranks_per_node, dtype=float), np.asarray(p.world_size, dtype=float)
    share = 2 * np.maximum(world - local, 0) / world
    by_tree = share * p.message_bytes / (network_rate(p) * local) * 1e6
    tree = np.equal(p.op, "all_reduce") & across_nodes(p)
    return np.where(tree, by_tree, ring_network_us(p))


def floor_us(p: Point, gpu: Gpu) -> Values:
    """Time of NCCL's fastest algorithm and protocol: start + steps * step + bytes / (rate * share).

    Trees and switches fill first (``_filling_us``). On a CPU: bytes through memory, plus
    ``cpu_step_us`` * log2(n); groups take turns if ranks have less than a core each. There a send
    in one direction, by every second rank, makes half the copies.
    """
    if gpu.kind == "cpu":
        steps, cores = np.log2(np.maximum(p.world_size, 2)), max(1, gpu.sm_count)
        turns = np.maximum(1, np.asarray(p.ranks_per_node) / np.maximum(p.world_size, cores))
        copies = CPU_COPIES * np.where(np.equal(p.op, "send_recv"), 0.5, 1.0)
        copies_us = bytes_moved(p) / (gpu.hbm_bytes_per_s / copies) * 1e6
        return turns * (copies_us + CPU_STEP_US * steps)
    fastest_us = np.inf
    for time_us in _algorithms(p, gpu):
        fastest_us = np.minimum(fastest_us, time_us)
    return fastest_us


def _algorithms(p: Point, gpu: Gpu) -> Iterator[Values]:
    """Time by each algorithm and protocol; infinite where it does not serve the collective."""
    world = np.asarray(p.world_size, dtype=float)
    nodes = np.where(across_nodes(p), world / np.minimum(p.ranks_per_node, world), 1.0)
    pcie, reduces = over_pcie(p, gpu), np.equal(p.op, "all_reduce")
    experts, pairs = is_among(p.op, EXPERTS), is_among(p.op, PAIRS)
    link_share = np.where(pcie, LINK_SHARE["pcie"], LINK_SHARE["nvlink"])
    link_share = link_share * np.where(link_inside(p, gpu) == "pcie", PCIE_BOTH_WAYS, 1.0)
    if gpu.architecture in SWITCHES_ADD:
        yield _in_switches_us(p, gpu, nodes)
    for algorithm, far_us in {"ring": ring_network_us(p), "tree": network_us(p)}.items():
        bytes_us = np.maximum(link_us(p, gpu) / link_share, far_us / LINK_SHARE["network"])
        for protocol, share in PROTOCOL_SHARE[algorithm].items():
            step_us = {
                kind: by_protocol[protocol] for kind, by_protocol in STEP_US[algorithm].items()
            }
            near_step_us = np.where(pcie, step_us["pcie"], step_us["nvlink"])
            far_step_us = np.where(nodes > 1, step_us["network"], 0.0)
            serves = ~(np.equal(protocol, NVLINK_ONLY) & (pcie | pairs))
            serves = serves & ~(experts & (protocol != "simple"))
            if algorithm == "ring":
                latency_us = _ring_latency_us(p, nodes, near_step_us, far_step_us)
                filling_us = 0.0
            else:
                serves = serves & reduces
                latency_us = (world / nodes - 1) * near_step_us + np.log2(nodes) * far_step_us
                latency_us = 2 * latency_us  # up and down the tree
                filling_us = _filling_us(latency_us, bytes_us / share)
            time_us = START_US[algorithm][protocol] + latency_us + bytes_us / share + filling_us
            yield np.where(serves, time_us, np.inf)


def _ring_latency_us(p: Point, nodes: Values, near_us: Values, far_us: Values) -> Values:
    """Latency of all steps around a ring, or of messages sent straight to each rank (``PAIRS``).

    ``near_us``: of a step within a node, ``far_us``: between nodes.
    """
    world = np.asarray(p.world_size, dtype=float)
    rounds = np.where(np.equal(p.op, "all_reduce"), 2, 1)
    around_us = rounds * ((world - nodes) * near_us + (nodes - 1) * far_us)
    far_messages = np.where(is_among(p.op, EXPERTS), 1, nodes - 1)
    to_all_us = (world / nodes - 1) * near_us + far_messages * far_us
    one_us = np.where(nodes > 1, far_us, near_us)
    straight_us = np.where(is_among(p.op, NEIGHBOURS), one_us, to_all_us)
    return np.where(is_among(p.op, PAIRS), straight_us, around_us)


def _filling_us(latency_us: Values, bytes_us: Values) -> Values:
    """Time until all steps of a tree have work: 2 sqrt(latency * bytes).

    Data passes in k pieces; the first goes through all steps alone: latency * k / steps + bytes *
    steps / k more than latency + bytes, least where both are equal.
    """
    return 2 * np.sqrt(latency_us * np.asarray(bytes_us, dtype=float))


def _in_switches_us(p: Point, gpu: Gpu, nodes: Values) -> Values:
    """Time of an all_reduce that NVSwitches add up (NVLS), with a tree over nodes.

    Each GPU sends its data once and receives the sum once; the switches pass data on at a share
    of the links' rate, which does not slow the network. Infinite where there are no such switches.
    """
    world = np.asarray(p.world_size, dtype=float)
    near_us = link_us(p, gpu) / bus_factor(p) / LINK_SHARE["nvlink"]
    far_us = network_us(p) / LINK_SHARE["network"]
    latency_us = SWITCH_US["nvlink"] + 2 * np.log2(nodes) * SWITCH_US["network"]
    serves = np.equal(p.op, "all_reduce") & ~over_pcie(p, gpu) & (world / nodes >= SWITCH_RANKS)
    bytes_us = np.maximum(near_us / SWITCH_SHARE, far_us)
    time_us = latency_us + bytes_us + _filling_us(latency_us, bytes_us)
    return np.where(serves, time_us, np.inf)
