"""A cluster of unlike GPUs, read from a YAML file: groups of equal ones, and links between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from itercast.capture.base.yaml_text import made_of, read_mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGroup:
    """Equal GPUs of a cluster.

    ``rows``: samples of a micro-batch on each of its replicas; 0: as many as balance best.
    ``threads``: of a rank on a CPU; 0: an equal share of the cores.
    """

    name: str
    gpu: str
    count: int
    node: str = ""
    rows: int = 0
    threads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins two groups: all that their GPUs send each other in one direction, and latency."""

    bytes_per_s: float
    latency_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """Groups in the order of ranks, and the links between two of them by their names."""

    path: Path
    groups: tuple[GpuGroup, ...]
    links: Mapping[frozenset[str], Link]

    @property
    def gpus(self) -> int:
        """Number of all GPUs."""
        return sum(group.count for group in self.groups)

    def link(self, a: GpuGroup, b: GpuGroup) -> Link:
        """The link of two groups; ValueError where the file has none."""
        link = self.links.get(frozenset((a.name, b.name)))
        if link is None:
            raise ValueError(f"{self.path}: no link joins {a.name!r} and {b.name!r}")
        return link


def read_cluster(path: Path) -> ClusterFile:
    """Read a cluster file; ValueError names what is wrong in it, in one line."""
    values = read_mapping(path, "cluster file")
    if unknown := sorted(map(str, values.keys() - {"groups", "links"})):
        raise ValueError(f"{path}: unknown keys {unknown}; known: ['groups', 'links']")
    stated_groups = values.get("groups")
    if not isinstance(stated_groups, Mapping) or not stated_groups:
        raise ValueError(f"{path}: groups maps names to a gpu and a count, got {stated_groups!r}")
    groups = tuple(_group(str(name), facts, path) for name, facts in stated_groups.items())
    links: dict[frozenset[str], Link] = {}
    entries = values.get("links") or []
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ValueError(f"{path}: links is a list, got {entries!r}")
    for entry in entries:
        pair, link = _link(entry, {g.name for g in groups}, path)
        if links.setdefault(pair, link) != link:
            disagreeing = f"{links[pair].bytes_per_s:g} and {link.bytes_per_s:g} bytes/s, "
            disagreeing += f"{links[pair].latency_us:g} and {link.latency_us:g} us"
            names = " and ".join(sorted(map(repr, pair)))
            raise ValueError(f"{path}: links between {names} disagree: {disagreeing}")
    return ClusterFile(path=path, groups=groups, links=links)


def _group(name: str, facts: Any, path: Path) -> GpuGroup:
    """A group of GPUs from its entry in the file; ValueError names what is wrong."""
    where = f"{path}: group {name!r}"
    if not isinstance(facts, Mapping):
        raise ValueError(f"{where} states a gpu and a count, got {facts!r}")
    group = made_of(GpuGroup, {"name": name, **facts}, where)
    if group.count < 1:
        raise ValueError(f"{where}: count is at least 1, got {group.count}")
    return group


def _link(entry: Any, names: set[str], path: Path) -> tuple[frozenset[str], Link]:
    """The names of two groups and the link between them, from an entry of the file."""
    where = f"{path}: link {entry!r}"
    between = entry.get("between") if isinstance(entry, Mapping) else None
    if (
        not isinstance(between, list)
        or len(between) != 2
        or not names.issuperset(map(str, between))
    ):
        raise ValueError(f"{where}: between lists two of {sorted(names)}")
    pair = frozenset(map(str, between))
    if len(pair) < 2:
        raise ValueError(f"{where}: links within a group are those of its node")
    rest = {key: value for key, value in entry.items() if key != "between"}
    link = made_of(Link, rest, where)
    if link.bytes_per_s <= 0:
        raise ValueError(f"{where}: bytes_per_s is above 0, got {link.bytes_per_s:g}")
    return pair, link


def subsets(cluster: ClusterFile) -> list[ClusterFile]:
    """The cluster, and each that leaves some of its groups out; most groups first."""
    groups = cluster.groups
    chosen = [c for n in range(len(groups), 0, -1) for c in combinations(groups, n)]
    return [ClusterFile(path=cluster.path, groups=c, links=cluster.links) for c in chosen]
