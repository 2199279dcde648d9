"""How an importer is run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from itercast.capture.base.close_names import unknown
from itercast.extras.imports.base import Hints, Imported, Unreadable, read_text
from itercast.names import importers

Reader = Callable[..., Imported]  # reads a path, with or without hints


def read_source(source: str, path: Path, hints: Hints) -> Imported:
    """Import a source; ValueError for an unknown source, a missing path or a wrong folder."""
    readers = importers()
    if source not in readers:
        raise unknown("source", source, sorted(readers))
    if not path.exists():
        raise ValueError(f"{str(path)!r}: no such file or folder")
    read = readers[source]
    found: Imported = read(*(path, hints)[: len(inspect.signature(read).parameters)])
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
