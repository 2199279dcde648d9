"""Groups of ranks, and links of their own that messages cross: of unlike GPUs, between CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from itercast.microbench.hardware.node import Node
from itercast.microbench.ops.step.alpha_beta import CPU_STEP_US, TO_ALL, bytes_moved
from itercast.microbench.ops.step.collective import Collective

RINGS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send_recv")


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


def between_cpus(groups: Mapping[str, Group], per_node: int, node: Node) -> Iterator[Crossing]:
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
