"""Files of measured batches, in groups of one ending and about one size."""

from __future__ import annotations

import os
from collections.abc import Iterable
from math import ceil, log10
from pathlib import PurePath

from itercast.capture.input.files import FileGroup, Opened

UNITS = ("B", "kB", "MB", "GB", "TB")


def file_groups(batches: Iterable[Iterable[Opened]], part: float) -> tuple[FileGroup, ...]:
    """The files of measured batches, which are a ``part`` of an epoch, in groups.

    Files that were opened again are all that there are: shards, or those of a short epoch.
    """
    waits, reads, count = dict[str, float](), 0, 0
    for batch in batches:
        count += 1
        for path, us in batch:
            waits[path], reads = waits.get(path, 0.0) + us, reads + 1
    more = 1.0 if reads > len(waits) or not 0 < part < 1 else 1 / part
    groups: dict[str, list[tuple[int, float]]] = {}
    for path, us in waits.items():
        if size := _size(path):
            groups.setdefault(_kind(path, size), []).append((size, us))
    return tuple(
        FileGroup(
            kind=kind,
            files=round(more * len(own)),
            nbytes=round(more * sum(size for size, _ in own)),
            waiting_us=sum(us for _, us in own) / count,
        )
        for kind, own in sorted(groups.items())
    )


def _size(path: str) -> int:
    """Bytes of a file; 0 where it is gone or no file."""
    try:
        return os.stat(path).st_size if os.path.isfile(path) else 0
    except OSError:
        return 0


def _kind(path: str, size: int) -> str:
    """Such as ``.jpg up to 100 kB``: the ending, and the power of ten that a file does not pass."""
    digits = min(ceil(log10(size)), 14)
    return f"{PurePath(path).suffix or 'files'} up to {10 ** (digits % 3)} {UNITS[digits // 3]}"
