"""The sources we read, by the name the command line knows them by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from microbench.importers import aiconfigurator, iterations, kineto, nccl_tests, neusight, vidur
from microbench.importers.base import Hints, Imported

PLAIN: Mapping[str, Callable[[Path], Imported]] = {
    "neusight": neusight.read,
    "aiconfigurator": aiconfigurator.read,
    "vidur": vidur.read,
    "iterations": iterations.read,
}
HINTED: Mapping[str, Callable[[Path, Hints], Imported]] = {
    "nccl-tests": nccl_tests.read,
    "kineto": kineto.read,
}
SOURCES = tuple(sorted([*PLAIN, *HINTED]))


def read_source(source: str, path: Path, hints: Hints) -> Imported:
    """The rows of a source; ValueError for an unknown source, a missing path or a wrong folder."""
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}; known: {list(SOURCES)}")
    if not path.exists():
        raise ValueError(f"{str(path)!r}: no such file or folder")
    if source in HINTED:
        return HINTED[source](path, hints)
    return PLAIN[source](path)
