"""Where the ranks of a plan lie: groups by axis, nodes, and the links that messages cross."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from itercast.capture.base.durations import counted
from itercast.capture.plan import ParallelPlan
from itercast.microbench.hardware.node import USUAL_CORES_PER_GPU, USUAL_GPUS_PER_NODE, Node
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.step.alpha_beta import (
    CPU_COPIES,
    CPU_STEP_US,
    NEIGHBOURS,
    NETWORK_BYTES_PER_S,
    TO_ALL,
    bytes_moved,
)
from itercast.microbench.ops.step.collective import Collective

UVM, SSD = "uvm", "ssd"
TIERS = (UVM, SSD)  # of memory beside a GPU's own: of its host, of a drive
RINGS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", *NEIGHBOURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks of one collective; ``per_node`` of them share a node."""

    size: int
    per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A link between unlike GPUs that messages of these kinds along ``axes`` cross.

    ``bytes_per_s`` of one direction are shared by ``sharers`` equal messages at a time.
    """

    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    bytes_per_s: float
    latency_us: float
    sharers: int

    def crossed_us(self, sent: Collective, axis: str, alone_us: float) -> float:
        """Time in us of a collective that takes ``alone_us`` without this link.

        At least that of its bytes over the link, plus the link's latency; twice that for an
        all_reduce, which goes there and back.
        """
        if axis not in self.axes or sent.op not in self.kinds or sent.world_size == 1:
            return alone_us
        link_us = self.sharers * float(bytes_moved(sent)) / self.bytes_per_s * 1e6
        ways = 2 if sent.op == "all_reduce" else 1
        return max(alone_us, link_us) + ways * self.latency_us


def rate_of_cpu(node: Node) -> float:
    """Bytes/s in one direction over a CPU's network, for all its ranks together."""
    return node.network_bytes_per_s * node.gpus_per_node


def host_cores(node: Node | None, ranks: int) -> float:
    """A rank's share of the cores of its host; the usual number where none is stated."""
    if node is None or not node.cores:
        return USUAL_CORES_PER_GPU
    return node.cores / min(ranks, node.gpus_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices that a plan runs on: their links, and the groups of ranks by axis.

    ``gpus_per_node``: that have a rank; the ``node`` may have more. ``crossings``: links between
    unlike GPUs of a plan.
    """

    gpu: Gpu
    node: Node | None
    gpus_per_node: int
    groups: Mapping[str, Group]
    crossings: tuple[Crossing, ...] = ()

    @property
    def place(self) -> tuple[Node | None, int]:
        """The node, and how many ranks share it: with the groups they decide prices of messages.

        The node itself, not its name, as files of one name may state other rates.
        """
        return self.node, self.gpus_per_node

    def on_one_cpu(self, group: Group) -> Group:
        """On CPUs the part of a group that shares one CPU's memory; on GPUs the whole group."""
        return replace(group, size=group.per_node) if self.gpu.kind == "cpu" else group

    def link(self, ranks: int) -> str:
        """The slowest kind of link among ``ranks`` GPUs of a node."""
        return self.node.link_among(ranks) if self.node else self.gpu.usual_link

    def link_bytes_per_s(self, ranks: int) -> float:
        """Bytes/s in one direction of the slowest link among ``ranks`` GPUs of a node."""
        if self.gpu.kind == "cpu":
            return float(self.gpu.hbm_bytes_per_s / CPU_COPIES)
        fast = self.node.link_rate(ranks) if self.node else self.gpu.link_bytes_per_s
        slow = self.gpu.pcie_bytes_per_s or NETWORK_BYTES_PER_S
        return slow if self.link(ranks) in ("pcie", "bridged") else fast

    def slowest_bytes_per_s(self, axis: str) -> float:
        """Bytes/s of one direction of the slowest link among the ranks of an axis."""
        group = self.groups[axis]
        if group.size > group.per_node:
            return self.network_bytes_per_s
        return self.link_bytes_per_s(group.size)

    @property
    def cores_of_a_rank(self) -> float:
        """A rank's share of its host's cores."""
        return host_cores(self.node, self.gpus_per_node)

    @property
    def gpus_of_a_rank(self) -> float:
        """GPUs of the node over ranks on it: above 1 where some of its GPUs have no rank."""
        if self.node is None:
            return 1.0
        return max(1.0, self.node.gpus_per_node / self.gpus_per_node)

    @property
    def network_bytes_per_s(self) -> float:
        """Bytes/s of a rank in the network between nodes while all ranks of its node send."""
        return self.network_share(self.gpus_per_node)

    def network_share(self, senders: int) -> float:
        """Bytes/s that each of ``senders`` ranks of a node sends to other nodes at the same time.

        If fewer ranks than GPUs send, each has more of the NICs, up to the rate of its PCIe.
        """
        if self.network_assumed or self.node is None:
            return float(NETWORK_BYTES_PER_S)
        per_gpu, gpus = self.node.network_bytes_per_s, self.node.gpus_per_node
        most = max(per_gpu, self.gpu.pcie_bytes_per_s)
        return min(most, per_gpu * gpus / min(gpus, senders))

    @property
    def network_assumed(self) -> bool:
        """Whether no node file states the network's rate."""
        return self.node is None or self.node.network_bytes_per_s == 0

    @property
    def network(self) -> str:
        """Text: the links and network that messages are priced by; empty where none is sent."""
        world, domain = self.groups["world"].size, self.gpus_per_node
        if self.gpu.kind == "cpu" and self.node and world > domain:
            return f"{self.node.name}: {rate_of_cpu(self.node) / 1e9:g} GB/s between CPUs"
        if world == 1 or self.gpu.kind == "cpu":
            return ""
        inside = min(world, domain)
        rates = f"{self.link_bytes_per_s(inside) / 1e9:g} GB/s {self.link(inside)} among {inside}"
        if world > domain:
            assumed_word = " (assumed: no node states it)" if self.network_assumed else ""
            rates += f", {self.network_bytes_per_s / 1e9:g} GB/s network beyond{assumed_word}"
        return f"{self.node.name if self.node else 'no node named'}: a GPU has {rates}"


def gpus_per_domain(gpu: Gpu, node: Node | None = None) -> int:
    """GPUs that reach each other without the network: of a rack-scale link domain, or of a host.

    Placement and plan search both use it: a "node" of a plan is such a domain.
    """
    if node is None:
        return max(USUAL_GPUS_PER_NODE, gpu.link_joins)
    rack_scale = node.topology != "pcie" and node.gpus_per_domain
    return node.gpus_per_domain if rack_scale else node.gpus_per_node


def cluster_for(plan: ParallelPlan, gpu: Gpu, node: Node | None = None) -> Cluster:
    """Places the ranks of a plan on nodes, innermost first: tp, cp, dp, pp; returns groups by axis.

    - ``shard``: cp and dp together, over which parameters are sharded; with hsdp the inner part of
      it, and ``replicate`` the outer part.
    - ``ep``: the inner part of dp, or of all ranks where tp does not cut experts; ``expert``: the
      replicas of its experts; ``expert_shard``: those of them that share them out,
      ``expert_replicate``: those that have the same share.
    - ``tables``: ranks that share embedding tables, neighbours of any axis but pp;
      ``table_replicas``: those that have the same part of them.
    - ``uvm``, ``ssd``: a rank and its host, or its drive (``TIERS``).
    - ``intra_node``: two ranks of one node; ``inter_node``: two of different nodes; ``near``: the
      ranks of ``shard`` in one node; ``world``: all.

    A CPU is one node of any number of ranks, or each of ``nodes`` is one.
    """
    per_node = plan.cpu_ranks
    if gpu.kind != "cpu":
        per_node = ranks_per_node(plan, gpus_per_domain(gpu, node))
    elif node is not None:
        _check_cpus(plan, node)
    dp_stride = plan.tp * plan.cp
    ep_stride = dp_stride if plan.expert_tp == plan.tp else 1
    expert_stride = ep_stride * plan.ep
    size_and_stride = {  # of each axis: its ranks, and how far apart two neighbours are numbered
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "dp": (plan.dp, dp_stride),
        "ep": (plan.ep, ep_stride),
        "pp": (plan.pp, dp_stride * plan.dp),
        "shard": (plan.shards, plan.tp),
        "replicate": (plan.cp * plan.dp // plan.shards, plan.tp * plan.shards),
        "world": (plan.world_size, 1),
        "tables": (plan.table_ranks, 1),
        "table_replicas": (plan.stage_ranks // plan.table_ranks, plan.table_ranks),
        "expert": (plan.expert_replicas, expert_stride),
        "expert_shard": (plan.expert_shards, expert_stride),
        "expert_replicate": (
            plan.expert_replicas // plan.expert_shards,
            expert_stride * plan.expert_shards,
        ),
    }
    groups = {
        axis: Group(size=size, per_node=max(1, min(size, per_node // stride)))
        for axis, (size, stride) in size_and_stride.items()
    }
    if plan.sampled < 1:  # participants are drawn from all nodes alike
        drawn = ceil(plan.participants * groups["dp"].per_node / plan.dp)
        groups["shard"] = Group(size=plan.participants, per_node=drawn)
    groups["intra_node"] = Group(size=2, per_node=2)
    groups["inter_node"] = Group(size=2, per_node=1)
    groups |= dict.fromkeys(TIERS, Group(size=1, per_node=1))
    groups["near"] = replace(groups["shard"], size=groups["shard"].per_node)
    far = _between_cpus(groups, per_node, node) if gpu.kind == "cpu" and node else ()
    return Cluster(gpu=gpu, node=node, gpus_per_node=per_node, groups=groups, crossings=tuple(far))


def _check_cpus(plan: ParallelPlan, node: Node) -> None:
    """ValueError unless the plan says how its ranks lie on CPUs and the node file their network."""
    ranks_per_node(plan, node.gpus_per_node)
    if plan.nodes == 0 or plan.pp > 1 or node.network_bytes_per_s == 0:
        rule = f"nodes=N, no pp, and network_bytes_per_s in the file of {node.name!r}"
        raise ValueError(f"plan {str(plan)!r}: CPUs as nodes need {rule}")


def ranks_per_node(plan: ParallelPlan, gpus_per_node: int) -> int:
    """Returns the ranks on each node; ValueError where the plan's nodes cannot hold its ranks."""
    nodes = plan.nodes or ceil(plan.world_size / gpus_per_node)
    if plan.world_size > nodes * gpus_per_node:
        place = f"{counted(nodes, 'node')} of {counted(gpus_per_node, 'GPU')}"
        raise ValueError(f"plan {str(plan)!r}: {plan.world_size} ranks do not fit {place}")
    return ceil(plan.world_size / nodes)


def _between_cpus(groups: Mapping[str, Group], per_node: int, node: Node) -> Iterator[Crossing]:
    """The network links that messages cross between CPUs.

    A ring sends over a CPU's link once for each group; in an all_to_all every rank of it sends.
    """
    for axis, group in groups.items():
        if group.size > group.per_node and axis != "inter_node":
            for kinds, sharers in ((RINGS, per_node // group.per_node), (TO_ALL, per_node)):
                yield Crossing(
                    kinds=kinds,
                    axes=(axis,),
                    bytes_per_s=rate_of_cpu(node),
                    latency_us=CPU_STEP_US * (group.size // group.per_node - 1),
                    sharers=sharers,
                )
