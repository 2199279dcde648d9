"""Files that lay there before a script ran for a forecast are there afterwards.

A file that the script empties or replaces is set aside in its folder, as ``.NAME.before-itercast``,
and given back when the script ends; where its process was killed, by the one that started it
(``give_back``). What is added to a file stays, and what the script deletes is deleted. Checkpoints
that it made are removed: they hold no data.
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
MARK = b"saved by itercast, without data\n"  # checkpoints begin so (``saved``)


class KeptFiles:
    """Files that a script writes over or makes, which ``listed`` names."""

    def __init__(self, listed: Path) -> None:
        self._listed, self._written = listed, set[str]()

    def about_to_write(self, file: Any) -> None:
        """Set a file aside that another one is about to take the place of."""
        if not isinstance(file, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(file))
        if path in self._written:
            return
        self._written.add(path)
        with self._listed.open("a") as listed:
            listed.write(path + END)
        # what is aside was put there by this process, another rank's, or one killed
        if os.path.isfile(path) and not os.path.lexists(_aside(path)):
            os.rename(path, _aside(path))


def _aside(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.before-itercast")


def give_back(listed: Path) -> None:
    """Put the files of a list back in their place, and remove those made without data."""
    for path in listed.read_text().split(END)[:-1] if listed.exists() else ():
        with suppress(FileNotFoundError):  # done, by this process or another rank's
            if os.path.lexists(_aside(path)):
                os.replace(_aside(path), path)
            elif os.path.isfile(path) and _is_without_data(path):
                os.unlink(path)


def _is_without_data(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(MARK)) == MARK


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
def files_kept(listed: Path) -> Iterator[None]:
    """Keep the files that a script writes over inside, and list them in a file."""
    _hear_of_files()
    own = KeptFiles(listed)
    LISTENING.append(own)
    try:
        yield
    finally:
        LISTENING.remove(own)
        give_back(listed)
