"""The importers by the name of their source on the command line, those of other packages too."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from itercast.microbench.extensions import with_added
from itercast.microbench.importers import nccl_tests
from itercast.microbench.importers.base import Hints, Imported, Unreadable, read_text
from itercast.microbench.importers.mapped import reader
from itercast.microbench.importers.mapped.source import load, mapped_sources
from itercast.microbench.importers.published import (
    iterations,
    kernelbench,
    megatron,
    mlperf,
)
from itercast.microbench.importers.traces import kineto, op_tables

OWN: Mapping[str, Callable[..., Imported] | Path] = {  # reads a path, with or without hints
    "iterations": iterations.read,
    "kernelbench": kernelbench.read,
    "kineto-traces": op_tables.read,
    "megatron-lm": megatron.read,
    "mlperf-training": mlperf.read,
    "nccl-tests": nccl_tests.read,
    "kineto": kineto.read,
    **mapped_sources(),
}
READERS = with_added("importers", OWN, (Path, Callable))
SOURCES = tuple(sorted(READERS))


def read_source(source: str, path: Path, hints: Hints) -> Imported:
    """Import a source; ValueError for an unknown source, a missing path or a wrong folder."""
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}; known: {list(SOURCES)}")
    if not path.exists():
        raise ValueError(f"{str(path)!r}: no such file or folder")
    read = READERS[source]
    if isinstance(read, Path):
        found = reader.read(load(read), path)
    else:
        found = read(*(path, hints)[: len(inspect.signature(read).parameters)])
    return replace(found, commit=commit_of(path))


def commit_of(checkout: Path) -> str:
    """The commit of a git checkout; empty for other folders and for packed references."""
    try:
        head = read_text(checkout / ".git/HEAD").strip()
        if named := re.fullmatch(r"ref: (refs/heads/[\w-][\w./-]*)", head):
            head = read_text(checkout / ".git" / named[1]).strip()
    except Unreadable:
        return ""
    return head if re.fullmatch(r"[0-9a-f]{40}", head) else ""
