"""Files that lay there before a script ran for a forecast are there afterwards.

A file that the script empties or replaces is set aside in its folder, as ``.NAME.before-itercast``,
and given back when the script ends; where its process was killed, by the one that started it
(``give_back``). What is added to a file stays, and what the script deletes is deleted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

KEPT, END = "kept", "\0"  # name of a list of files, end of a path in it


class KeptFiles:
    """Files that a script writes over, and files that it makes; ``listed`` names the first."""

    def __init__(self, listed: Path) -> None:
        self._listed, self._aside, self._made = listed, set[str](), set[str]()
        self._process = os.getpid()  # workers of a DataLoader are others

    def about_to_write(self, file: Any) -> None:
        """Set a file aside that another one is about to take the place of."""
        if not isinstance(file, str | bytes | os.PathLike) or os.getpid() != self._process:
            return
        path = os.path.abspath(os.fsdecode(file))
        if path in self._made:
            return
        if os.path.lexists(_aside(path)):  # by this process, another rank's, or one killed
            self._keep(path)
        elif os.path.isfile(path):
            self._keep(path)
            os.rename(path, _aside(path))
        elif not os.path.lexists(path):
            self._made.add(path)

    def _keep(self, path: str) -> None:
        if path not in self._aside:
            self._aside.add(path)
            with self._listed.open("a") as file:
                file.write(path + END)

    def give_back(self, unwritten: set[str]) -> None:
        """Put files back in their place, and remove those of ``unwritten`` that were made empty."""
        give_back(self._listed)
        for path in unwritten & self._made:
            if os.path.isfile(path) and not os.path.getsize(path):
                os.unlink(path)


def _aside(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.before-itercast")


def give_back(listed: Path) -> None:
    """Put the files of a list back in their place, those that are not there yet."""
    for path in listed.read_text().split(END)[:-1] if listed.exists() else ():
        with suppress(FileNotFoundError):  # given back, by this process or another rank's
            os.replace(_aside(path), path)


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
def files_kept(unwritten: set[str], listed: Path) -> Iterator[None]:
    """Keep the files that a script writes over inside, and list them in a file.

    ``unwritten``: files that it saved no data to.
    """
    _hear_of_files()
    own = KeptFiles(listed)
    LISTENING.append(own)
    try:
        yield
    finally:
        LISTENING.remove(own)
        own.give_back(unwritten)
