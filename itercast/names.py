"""The names that options take (GPUs, nodes, cases...): what ``list`` prints and shells complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from itercast.capture.base.extensions import with_added

KINDS = {  # the function that names them, imported when asked for
    "gpus": "microbench.hardware.spec.gpu_names",
    "nodes": "microbench.hardware.node.node_names",
    "hosts": "names.hosts",
    "stacks": "microbench.hardware.stack.known_stacks",
    "cases": "capture.cases.registry.case_names",
    "keys": "names.keys",  # of plans
    "families": "microbench.ops.families",
    "bundles": "names.bundles",
    "sources": "names.importers",
}


def hosts() -> list[str]:
    """Names of hosts, the usual one first."""
    from itercast.microbench.hardware.host import USUAL, host_names

    return [USUAL, *host_names()]


def keys() -> list[str]:
    """Names of the keys of plans, those that packages add last."""
    from itercast.capture.plan import KEYS
    from itercast.capture.plan_keys import added_keys

    return [*KEYS, *added_keys()]


def bundles() -> list[Path]:
    """Folders of the bundles on this machine: local ones, then those that ship."""
    from itercast.learners.bundle import SHIPPED, SHIPPED_CPU
    from itercast.learners.known_bundles import local_bundles

    return [*local_bundles(), SHIPPED, SHIPPED_CPU]


def importers() -> Mapping[str, Callable[..., Any]]:
    """The functions that read published measurements, by source, from all installed packages."""
    tables: Mapping[str, Mapping[str, Any]] = with_added("importer_tables", {}, Mapping)
    readers = {name: reader for table in tables.values() for name, reader in table.items()}
    return with_added("importers", readers, Callable)


def listing(kind: str) -> list[str]:
    """All names of one kind; ValueError where there is no such kind."""
    if kind not in KINDS:
        raise ValueError(f"cannot list {kind!r}; known: {', '.join(KINDS)}")
    module, _, function = KINDS[kind].rpartition(".")
    return list(map(str, getattr(import_module(f"itercast.{module}"), function)()))


def completing(kind: str) -> Callable[[str], list[str]]:
    """The function by which a shell completes a name of this kind."""

    def names(incomplete: str) -> list[str]:
        return [name for name in listing(kind) if name.startswith(incomplete)]

    return names


def kinds(incomplete: str) -> list[str]:
    """The kinds of names that start with ``incomplete``."""
    return [kind for kind in KINDS if kind.startswith(incomplete)]
