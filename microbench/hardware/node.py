"""A node: GPUs of one kind in one host, the links between them, and the network beyond."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from microbench.hardware.spec import check_types, read_facts

HERE = Path(__file__).parent / "nodes"
TOPOLOGIES = ("nvswitch", "mesh", "hypercube", "pairwise", "pcie")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host; rates are one direction and per GPU.

    ``link_bytes_per_s`` is the fast link among GPUs (0: PCIe only), ``network_bytes_per_s`` a
    GPU's share of the NICs (0: not stated). ``gpus_per_domain`` counts the GPUs that reach each
    other by the fast link, over several hosts in a rack-scale machine; 0 means those of one host,
    or two where bridges join pairs.
    """

    name: str
    gpu: str
    gpus_per_node: int
    topology: str
    link_bytes_per_s: float = 0.0
    network_bytes_per_s: float = 0.0
    nics: int = 0
    gpus_per_domain: int = 0
    host: str = ""

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise ValueError(f"{self.name}: topology {self.topology!r}; allowed: {TOPOLOGIES}")
        if self.gpus_per_node < 1:
            raise ValueError(f"{self.name}: gpus_per_node must be at least 1")
        rates = (self.link_bytes_per_s, self.network_bytes_per_s, self.nics, self.gpus_per_domain)
        if min(rates) < 0:
            raise ValueError(f"{self.name}: rates and counts must not be negative")

    @property
    def domain(self) -> int:
        """GPUs in one fast-link domain; 1 where there is none."""
        if self.gpus_per_domain:
            return self.gpus_per_domain
        return {"pcie": 1, "pairwise": min(2, self.gpus_per_node)}.get(
            self.topology, self.gpus_per_node
        )

    def link_among(self, ranks: int) -> str:
        """What the slowest hop among so many GPUs of it runs over."""
        if ranks > self.domain:
            return "pcie"
        return "pairwise" if self.topology == "pairwise" else "nvlink"


def node_from_dict(values: Mapping[str, Any], where: str) -> Node:
    """A Node from plain values; ``where`` names the file in messages."""
    return Node(**check_types(values, fields(Node), where))


def load_node(name_or_path: str) -> Node:
    """The node of that name in microbench/hardware/nodes, or in a YAML file of the same form."""
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        path = HERE / f"{name_or_path}.yaml"
        if not path.is_file():
            raise ValueError(f"unknown node {name_or_path!r}; known: {node_names()}")
    return node_from_dict({"name": path.stem, **read_facts(path)}, str(path))


def node_names() -> list[str]:
    """Names of the nodes that ship with the project."""
    return sorted(p.stem for p in HERE.glob("*.yaml"))
