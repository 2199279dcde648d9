"""All importers by the name of their source: our own, those of published tables, and added ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from itercast.eval.public.sources import iterations, kernelbench, megatron, mlperf, op_tables
from itercast.microbench.extensions import with_added
from itercast.microbench.importers.base import Hints, Imported
from itercast.microbench.importers.sources import OWN, Reader, read_by

MAPPINGS = Path(__file__).parent / "sources/mappings"
PUBLISHED: Mapping[str, Reader] = {
    "iterations": iterations.read,
    "kernelbench": kernelbench.read,
    "kineto-traces": op_tables.read,
    "megatron-lm": megatron.read,
    "mlperf-training": mlperf.read,
    **{path.stem: path for path in sorted(MAPPINGS.glob("*.yaml"))},
}
READERS = with_added("importers", {**OWN, **PUBLISHED}, (Path, Callable))
SOURCES = tuple(sorted(READERS))


def read_source(source: str, path: Path, hints: Hints) -> Imported:
    """Import a source; ValueError for an unknown source, a missing path or a wrong folder."""
    return read_by(READERS, source, path, hints)
