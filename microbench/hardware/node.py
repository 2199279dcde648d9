"""Node: GPUs of one kind in one host, the links among them and the network to other hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.close_names import unknown
from itercast.capture.base.extensions import with_added
from itercast.capture.base.yaml_text import facts_of, made_of, read_mapping
from itercast.microbench.hardware.spec import NAMES

HERE = Path(__file__).parent / "nodes"
WRITTEN: Mapping[str, str] = facts_of(str(HERE.with_name(NAMES)))["nodes"]  # patterns by node
USUAL_GPUS_PER_NODE: int = assumed(__file__, "usual_gpus_per_node")  # where no node is named
USUAL_CORES_PER_GPU: int = assumed(__file__, "usual_cores_per_gpu")
TOPOLOGIES = ("nvswitch", "mesh", "hypercube", "pairwise", "pcie")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host with its GPUs; rates are per GPU and in one direction.

    - ``also``: GPUs that it comes with in place of ``gpu``: other memory, the same links.
    - ``link_bytes_per_s``: all fast links of a GPU together; 0 where there is PCIe only.
    - ``network_bytes_per_s``: a GPU's share of the network cards; 0 where it is not stated.
    - ``gpus_per_domain``: GPUs connected by the fast link, over several hosts in a rack-scale
      machine; 0 means all GPUs of the host, or two where bridges join pairs.
    - ``cores``, ``memory_bytes``: CPU cores and memory of the host; 0 where they are not stated.
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
    cores: int = 0
    memory_bytes: float = 0.0
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise ValueError(f"{self.name}: topology {self.topology!r}; allowed: {TOPOLOGIES}")
        if self.gpus_per_node < 1:
            raise ValueError(
                f"{self.name}: gpus_per_node must be at least 1, got {self.gpus_per_node}"
            )
        names = ("link_bytes_per_s", "network_bytes_per_s", "nics", "gpus_per_domain", "cores")
        for name in (*names, "memory_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{self.name}: {name} must be at least 0, got {getattr(self, name)}"
                )

    @property
    def gpus(self) -> tuple[str, ...]:
        """All GPUs that it comes with, one kind at a time."""
        return (self.gpu, *self.also)

    @property
    def domain(self) -> int:
        """Number of GPUs that the fast link connects; 1 where there is no such link."""
        if self.gpus_per_domain:
            return self.gpus_per_domain
        return {"pcie": 1, "pairwise": min(2, self.gpus_per_node)}.get(
            self.topology, self.gpus_per_node
        )

    def link_rate(self, ranks: int) -> float:
        """Bytes/s that a GPU sends by fast link where ``ranks`` GPUs of the node take part.

        In a mesh each pair of GPUs has links of its own: a GPU uses those to the ranks - 1 others,
        of GPUs - 1.
        """
        if self.topology != "mesh" or self.domain < 2:
            return self.link_bytes_per_s
        others = max(2, min(ranks, self.domain)) - 1
        return self.link_bytes_per_s * others / (self.domain - 1)

    def link_among(self, ranks: int) -> str:
        """Kind of the slowest link in a ring over this many GPUs of the node.

        Where bridges join pairs, a ring crosses PCIe between pairs alone: "bridged".
        """
        if ranks > self.domain:
            return "bridged" if self.topology == "pairwise" else "pcie"
        return "pairwise" if self.topology == "pairwise" else "nvlink"


def load_node(name_or_path: str) -> Node:
    """Load a node by its name in microbench/hardware/nodes, or from a YAML file of that form."""
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        named = node_named(name_or_path)
        if named is None:
            raise unknown("node", name_or_path, node_names())
        path = _node_files()[named]
    facts = read_mapping(path, "node file")
    return made_of(Node, {"name": path.stem, **facts}, str(path))


def node_names() -> list[str]:
    """Names of the nodes that ship with the project or that other packages add."""
    return sorted(_node_files())


@cache
def _node_files() -> dict[str, Path]:
    return with_added("nodes", {p.stem: p for p in HERE.glob("*.yaml")})


def node_named(text: str) -> str | None:
    """The name of a node's file, in any spelling or within a longer text; None without a file."""
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).removesuffix(" nvlink").split()
    for spelling in ("-".join(words), "-".join(reversed(words))):
        if spelling in _node_files():
            return spelling
    return next((name for name, said in WRITTEN.items() if re.search(said, " ".join(words))), None)
