"""The names that options take (GPUs, nodes, cases...): what ``list`` prints and shells complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def _gpus() -> Iterable[str]:
    from itercast.microbench.hardware.spec import (
        gpu_names,  # lazy, as all below: only what is asked
    )

    return gpu_names()


def _nodes() -> Iterable[str]:
    from itercast.microbench.hardware.node import node_names

    return node_names()


def _hosts() -> Iterable[str]:
    from itercast.microbench.hardware.host import USUAL, host_names

    return [USUAL, *host_names()]


def _stacks() -> Iterable[str]:
    from itercast.microbench.hardware.stack import stack_names

    return stack_names()


def _cases() -> Iterable[str]:
    from itercast.microbench.cases.registry import case_names

    return case_names()


def _families() -> Iterable[str]:
    from itercast.microbench.ops import families

    return sorted(families())


def _bundles() -> Iterable[str]:
    from itercast.learners.bundle import SHIPPED, SHIPPED_CPU
    from itercast.learners.known_bundles import LOCAL

    folders = (*LOCAL, SHIPPED, SHIPPED_CPU)
    return [str(p) for p in folders if (p / "bundle.json").is_file()]


KINDS: dict[str, Callable[[], Iterable[str]]] = {
    "gpus": _gpus,
    "nodes": _nodes,
    "hosts": _hosts,
    "stacks": _stacks,
    "cases": _cases,
    "families": _families,
    "bundles": _bundles,
}


def listing(kind: str) -> list[str]:
    """All names of one kind; ValueError where there is no such kind."""
    if kind not in KINDS:
        raise ValueError(f"cannot list {kind!r}; known: {', '.join(KINDS)}")
    return list(KINDS[kind]())


def completing(kind: str) -> Callable[[str], list[str]]:
    """The function by which a shell completes a name of this kind."""

    def names(incomplete: str) -> list[str]:
        return [name for name in listing(kind) if name.startswith(incomplete)]

    return names


def kinds(incomplete: str) -> list[str]:
    """The kinds of names that start with ``incomplete``."""
    return [kind for kind in KINDS if kind.startswith(incomplete)]
