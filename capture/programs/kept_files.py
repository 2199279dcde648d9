"""Files that lay there before a script ran for a forecast are there afterwards.

A file that the script empties or replaces is set aside in its folder, as ``.NAME.before-itercast``,
and given back when the script ends; a process that is killed leaves it there. What is added to a
file stays, and what the script deletes is deleted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any


class KeptFiles:
    """Files that a script writes over, by where they are meanwhile; and files that it makes."""

    def __init__(self) -> None:
        self._aside, self._made = dict[str, str](), set[str]()
        self._process = os.getpid()  # workers of a DataLoader are others

    def about_to_write(self, file: Any) -> None:
        """Set a file aside that another one is about to take the place of."""
        if not isinstance(file, str | bytes | os.PathLike) or os.getpid() != self._process:
            return
        path = os.path.abspath(os.fsdecode(file))
        folder, name = os.path.split(path)
        aside = os.path.join(folder, f".{name}.before-itercast")
        if path in self._made:
            return
        if os.path.lexists(aside):  # by this process, that of another rank, or one that was killed
            self._aside[path] = aside
        elif os.path.isfile(path):
            self._aside[path] = aside
            os.rename(path, aside)
        elif not os.path.lexists(path):
            self._made.add(path)

    def give_back(self, unwritten: set[str]) -> None:
        """Put files back in their place, and remove those of ``unwritten`` that were made empty."""
        for path, aside in self._aside.items():
            with suppress(FileNotFoundError):  # the process of another rank has given it back
                os.replace(aside, path)
        for path in unwritten & self._made:
            if os.path.isfile(path) and not os.path.getsize(path):
                os.unlink(path)


LISTENING: list[KeptFiles] = []


@cache
def _hear_of_files() -> None:
    """Tell who listens of files that are emptied or replaced, from here on."""

    def heard(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and LISTENING:
            emptied = (args[2] or 0) & (os.O_TRUNC | os.O_EXCL) == os.O_TRUNC
            written = args[0] if emptied else None
        elif event == "os.rename" and LISTENING:
            written = args[1]
        else:
            return
        own = LISTENING.pop()  # it renames files, too
        try:
            own.about_to_write(written)
        finally:
            LISTENING.append(own)

    sys.addaudithook(heard)


@contextmanager
def files_kept(unwritten: set[str]) -> Iterator[None]:
    """Keep the files that a script writes over inside; ``unwritten``: those it saved no data to."""
    _hear_of_files()
    own = KeptFiles()
    LISTENING.append(own)
    try:
        yield
    finally:
        LISTENING.remove(own)
        own.give_back(unwritten)
