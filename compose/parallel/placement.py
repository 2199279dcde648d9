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
        """Time of a collective along an axis: at least its bytes over the link, and its latency.

        A sum goes over the link and comes back.
        """
        if axis not in self.axes or sent.op not in self.kinds or sent.world_size == 1:
            return alone_us
        link_us = self.sharers * float(bytes_moved(sent)) / self.bytes_per_s * 1e6
        ways = 2 if sent.op == "all_reduce" else 1
        return max(alone_us, link_us) + ways * self.latency_us


def rate_of_cpu(node: Node) -> float:
    """Bytes/s of the network of a CPU in one direction, of all its ranks together."""
    return node.network_bytes_per_s * node.gpus_per_node


def host_cores(node: Node | None, ranks: int) -> float:
    """A rank's share of the cores of its host; the usual number where none is stated."""
    if node is None or not node.cores:
        return USUAL_CORES_PER_GPU
    return node.cores / min(ranks, node.gpus_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices that a plan runs on: their links, and the groups of ranks by axis.

    ``crossings``: links between unlike GPUs of a plan.
    """

    gpu: Gpu
    node: Node | None
    gpus_per_node: int
    groups: Mapping[str, Group]
    crossings: tuple[Crossing, ...] = ()

    @property
    def place(self) -> tuple[Node | None, int]:
        """What prices of messages depend on beside groups: the node itself, as files of one name
        may state other rates, and how many ranks share it.
        """
        return self.node, self.gpus_per_node

    def on_one_cpu(self, group: Group) -> Group:
        """The ranks of a group on one CPU, which share its memory; on GPUs the whole group."""
        return replace(group, size=group.per_node) if self.gpu.kind == "cpu" else group

    def link(self, ranks: int) -> str:
        """The slowest kind of link among so many GPUs of a node."""
        return self.node.link_among(ranks) if self.node else self.gpu.usual_link

    def link_bytes_per_s(self, ranks: int) -> float:
        """Bytes/s of one direction of that link."""
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
        """GPUs whose part of their host each rank has: its own, and that of GPUs without ranks."""
        if self.node is None:
            return 1.0
        return self.node.gpus_per_node / min(self.gpus_per_node, self.node.gpus_per_node)

    @property
    def network_bytes_per_s(self) -> float:
        """A rank's share of the network between nodes."""
        return self.network_share(self.gpus_per_node)

    def network_share(self, senders: int) -> float:
        """Bytes/s of one of so many ranks of a node that send to other nodes at a time.

        Where they are fewer than its GPUs, each has more of the NICs, up to what PCIe carries.
        """
        if self.network_assumed or self.node is None:
            return float(NETWORK_BYTES_PER_S)
        share, gpus = self.node.network_bytes_per_s, self.node.gpus_per_node
        reached = max(share, self.gpu.pcie_bytes_per_s)
        return min(reached, share * gpus / min(gpus, senders))

    @property
    def network_assumed(self) -> bool:
        """Whether no node file states the network's rate."""
        return self.node is None or self.node.network_bytes_per_s == 0

    @property
    def network(self) -> str:
        """The links and network that messages are priced by; empty where none is sent."""
        world, domain = self.groups["world"].size, self.gpus_per_node
        if self.gpu.kind == "cpu" and self.node and world > domain:
            return f"{self.node.name}: {rate_of_cpu(self.node) / 1e9:g} GB/s between CPUs"
        if world == 1 or self.gpu.kind == "cpu":
            return ""
        inside = min(world, domain)
        told = f"{self.link_bytes_per_s(inside) / 1e9:g} GB/s {self.link(inside)} among {inside}"
        if world > domain:
            assumed_word = " (assumed: no node states it)" if self.network_assumed else ""
            told += f", {self.network_bytes_per_s / 1e9:g} GB/s network beyond{assumed_word}"
        return f"{self.node.name if self.node else 'no node named'}: a GPU has {told}"


def gpus_per_domain(gpu: Gpu, node: Node | None = None) -> int:
    """GPUs that reach each other without the network: those of a rack-scale link domain or a host.

    Placement and plan search both take it from here: a "node" of a plan is such a domain.
    """
    if node is None:
        return max(USUAL_GPUS_PER_NODE, gpu.link_joins)
    rack_scale = node.topology != "pcie" and node.gpus_per_domain
    return node.gpus_per_domain if rack_scale else node.gpus_per_node


def cluster(plan: ParallelPlan, gpu: Gpu, node: Node | None = None) -> Cluster:
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
    inner = {"tp": 1, "cp": plan.tp, "shard": plan.tp, "dp": plan.tp * plan.cp}
    inner |= {"pp": inner["dp"] * plan.dp, "world": 1}
    inner["ep"] = inner["dp"] if plan.expert_tp == plan.tp else 1
    size = {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp, "ep": plan.ep, "pp": plan.pp}
    size |= {"shard": plan.shards, "world": plan.world_size}
    size["tables"], inner["tables"] = plan.table_ranks, 1
    size["table_replicas"] = plan.stage_ranks // plan.table_ranks
    inner["table_replicas"] = plan.table_ranks
    inner["replicate"] = plan.tp * plan.shards
    size["replicate"] = plan.cp * plan.dp // plan.shards
    inner["expert"], size["expert"] = inner["ep"] * plan.ep, plan.expert_replicas
    inner["expert_shard"], size["expert_shard"] = inner["expert"], plan.expert_shards
    inner["expert_replicate"] = inner["expert"] * plan.expert_shards
    size["expert_replicate"] = plan.expert_replicas // plan.expert_shards
    groups = {
        axis: Group(size=n, per_node=max(1, min(n, per_node // inner[axis])))
        for axis, n in size.items()
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
    """ValueError where a plan does not say how its ranks lie on CPUs, or a file their network."""
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
    """What messages cross between CPUs: a ring leaves each once for each of its groups, of an
    all_to_all every rank sends all that it has for others.
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
