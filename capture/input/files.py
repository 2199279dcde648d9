"""Files that a dataset opens while it makes a batch, and how long it waits for each."""

from __future__ import annotations

import builtins
import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, log10
from pathlib import PurePath
from typing import Any
from unittest.mock import patch

UNITS = ("B", "kB", "MB", "GB", "TB")
Opened = tuple[str, float]  # a path, and us of waiting from its opening to the next one's


@dataclass(frozen=True, slots=True, kw_only=True)
class FileGroup:
    """Files of one ending and about one size: ``files`` and ``nbytes`` of an epoch.

    ``waiting_us``: mean time that a batch waits for those of them that it reads.
    """

    kind: str
    files: int
    nbytes: int
    waiting_us: float


class OpenedFiles:
    """Notes the files that are opened for reading; ``waited`` is the us of waiting so far."""

    def __init__(self) -> None:
        self.found: list[Opened] = []
        self.waited: Callable[[], float] | None = None
        self.since_us = 0.0

    def begin(self, waited: Callable[[], float]) -> None:
        """Start a batch."""
        self.found, self.since_us, self.waited = [], 0.0, waited

    def end(self) -> tuple[Opened, ...]:
        """The files of the batch."""
        self._charge()
        self.waited = None
        return tuple(self.found)

    def note(self, path: Any) -> None:
        """Note that a file is opened; between batches, and what is no path, is left out."""
        if isinstance(path, str | os.PathLike) and self._charge():
            self.found.append((os.fspath(path), 0.0))

    def _charge(self) -> bool:
        """Add the time since the last opening to that file; False between batches.

        The clock itself opens a file, which is none of the dataset's.
        """
        waited, self.waited = self.waited, None
        if waited is None:
            return False
        now_us = waited()
        if self.found:
            path, us = self.found[-1]
            self.found[-1] = (path, us + max(0.0, now_us - self.since_us))
        self.since_us, self.waited = now_us, waited
        return True

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what Python opens inside."""

        @functools.wraps(open)
        def noted(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "r" in mode:
                self.note(file)
            return original(file, mode, *args, **options)

        original = builtins.open
        with patch.object(builtins, "open", noted), patch.object(io, "open", noted):
            yield


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
