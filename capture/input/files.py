"""Files that a dataset opens while it makes a batch, and how long it waits for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

CODE = (".py", ".pyc")  # which imports open
Opened = tuple[str, float]  # a path, and us of waiting from its opening to the next one's


@dataclass(frozen=True, slots=True, kw_only=True)
class FileGroup:
    """Files with one ending and about equal sizes: ``files`` and ``nbytes`` of an epoch.

    ``waiting_us``: mean time per batch that is spent waiting for files of the group.
    """

    kind: str
    files: int
    nbytes: int
    waiting_us: float


class OpenedFiles:
    """Notes the files that are opened for reading while a batch is made, and waits for each."""

    def __init__(self) -> None:
        self.opened: list[Opened] = []
        self.waited: Callable[[], float] | None = None  # a clock of waiting in us, during a batch
        self.since_us = 0.0

    def begin(self, waited: Callable[[], float]) -> None:
        """Start a batch, with a clock that says how long it has waited so far."""
        self.opened, self.since_us, self.waited = [], 0.0, waited

    def end(self) -> tuple[Opened, ...]:
        """End a batch; returns the files that it opened."""
        self._charge()
        self.waited = None
        return tuple(self.opened)

    def note(self, path: Any) -> None:
        """Note that a file is opened; between batches, and what is no path, is left out."""
        if isinstance(path, str | os.PathLike) and self._charge():
            self.opened.append((os.fspath(path), 0.0))

    def _charge(self) -> bool:
        """Add the waiting since the last file was opened to that file; False between batches.

        The clock itself opens a file, which must not be noted: ``waited`` is None meanwhile.
        """
        waited, self.waited = self.waited, None
        if waited is None:
            return False
        now_us = waited()
        if self.opened:
            path, waited_us = self.opened[-1]
            self.opened[-1] = (path, waited_us + max(0.0, now_us - self.since_us))
        self.since_us, self.waited = now_us, waited
        return True

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what Python opens inside; ``open`` stays Python's own, which scripts may ask."""
        _hear_of_files()
        LISTENING.append(self)
        try:
            yield
        finally:
            LISTENING.remove(self)


LISTENING: list[OpenedFiles] = []


@cache
def _hear_of_files() -> None:
    """Tell those in ``LISTENING`` of files that are opened for reading, from here on.

    An audit hook of Python cannot be removed again.
    """

    def heard(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and LISTENING:
            path, mode, _ = args
            code = isinstance(path, str) and path.endswith(CODE)
            if isinstance(mode, str) and "r" in mode and not code:
                LISTENING[-1].note(path)

    sys.addaudithook(heard)
