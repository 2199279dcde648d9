"""Files that lay there before a script ran for a forecast are there afterwards.

A file that the script writes to, replaces, moves or deletes is set aside in its folder, as
``.NAME.before-itercast``, and given back when the script ends; where its process was killed, by the
one that started it (``give_back``). A folder that it deletes by ``shutil.rmtree`` is given back
too; a folder that it moves stays moved. What it writes into large files (``MOST_BYTES``) stays
written. Checkpoints that the script made are removed: they hold no data.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 30  # no assumption: of a file that is copied before it is changed in place
KEPT, END = "kept", "\0"  # name of a list of files, end of a path in it
PART = ".part"  # ends the name of an unfinished copy
MARK = b"saved by itercast, without data\n"  # checkpoints begin so (``saved``)


class KeptFiles:
    """Files that a script writes over, deletes or makes, which ``listed`` names."""

    def __init__(self, listed: Path) -> None:
        self._listed, self._seen, self._begun_s = listed, set[str](), time.time()

    def about_to_write(self, file: Any) -> None:
        """Set a file aside that another one is about to take the place of."""
        self._keep(file, os.path.isfile, os.rename)

    def about_to_delete(self, file: Any) -> None:
        """Set a file aside, and leave it in its place."""
        self._keep(file, self._is_older, partial(os.link, follow_symlinks=False))

    def about_to_change(self, file: Any) -> None:
        """Set a copy of a file aside that is changed in place, and of no link to it."""
        if isinstance(file, str | bytes | os.PathLike):
            self._keep(os.path.realpath(file), self._is_older_and_small, _copy_aside)

    def about_to_move(self, file: Any) -> None:
        """Set a copy of a file aside, as it lives on under another name."""
        self._keep(file, self._is_older, _copy_aside)

    def about_to_delete_all(self, folder: Any) -> None:
        """Set a folder aside, and leave an empty one in its place."""
        self._keep(folder, self._holds_older, _set_all_aside)

    def _keep(
        self, file: Any, holds_data: Callable[[str], bool], set_aside: Callable[[str, str], object]
    ) -> None:
        """List a path; the first time, set the file aside if it holds the user's data."""
        if not isinstance(file, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(file))
        if path in self._seen:
            return
        with self._listed.open("a") as listed:
            listed.write(path + END)
        # what is aside was put there by this process, another rank's, or one killed
        if holds_data(path) and not os.path.lexists(_aside(path)):
            set_aside(path, _aside(path))
        self._seen.add(path)

    def _is_older(self, path: str) -> bool:
        """Whether a file lay there before, unchanged: temporary ones are deleted, too."""
        return os.path.isfile(path) and os.lstat(path).st_ctime < self._begun_s

    def _is_older_and_small(self, path: str) -> bool:
        return self._is_older(path) and os.path.getsize(path) <= MOST_BYTES

    def _holds_older(self, folder: str) -> bool:
        """Whether a folder, and no link to one, holds files that lay there before."""
        files = (os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)
        return not os.path.islink(folder) and any(map(self._is_older, files))


def _aside(path: str) -> str:
    """The path at which a file is set aside."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.before-itercast")


def _copy_aside(path: str, aside: str) -> None:
    """Copy a file aside: whole or, where the process is ended meanwhile, not at all."""
    shutil.copy2(path, aside + PART)
    os.rename(aside + PART, aside)


def _set_all_aside(folder: str, aside: str) -> None:
    """Move a folder aside, and leave an empty one."""
    os.rename(folder, aside)
    os.mkdir(folder)


def give_back(listed: Path) -> None:
    """Put the files of a list back in their place, and remove those made without data.

    The last first: a folder may hold files that were set aside before it was.
    """
    for path in reversed(listed.read_text().split(END)[:-1]) if listed.exists() else ():
        with suppress(FileNotFoundError):
            os.unlink(_aside(path) + PART)
        with suppress(FileNotFoundError):  # done, by this process or another rank's
            if os.path.lexists(_aside(path)):
                if os.path.isfile(path) and filecmp.cmp(path, _aside(path), shallow=False):
                    os.unlink(_aside(path))  # as it was: others may hold it open
                    continue
                if os.path.isdir(_aside(path)):
                    shutil.rmtree(path, ignore_errors=True)  # made since
                os.replace(_aside(path), path)
                os.unlink(_aside(path))  # still there where both are one file
            elif os.path.isfile(path) and _is_without_data(path):
                os.unlink(path)


def _is_without_data(path: str) -> bool:
    """Whether a file is a checkpoint that the script saved in place of a real one."""
    with open(path, "rb") as file:
        return file.read(len(MARK)) == MARK


LISTENING: list[KeptFiles] = []
EVENTS = ("open", "sqlite3.connect", "os.rename", "os.remove", "shutil.rmtree")


@cache
def _hear_of_files() -> None:
    """Tell those in ``LISTENING`` of files that are about to be written to, moved or deleted.

    An audit hook of Python does, which runs before the file changes and cannot be removed again.
    """

    def heard(event: str, args: tuple[Any, ...]) -> None:
        """Tell the innermost listener what an event will do to a file, before it is done."""
        if not LISTENING or event not in EVENTS:
            return
        kept_files = LISTENING.pop()  # it opens, renames and links files, too
        try:
            if event == "open":
                flags = args[2] or 0
                if flags & (os.O_TRUNC | os.O_EXCL) == os.O_TRUNC:
                    kept_files.about_to_write(args[0])
                elif flags & (os.O_WRONLY | os.O_RDWR):
                    kept_files.about_to_change(args[0])
            elif event == "sqlite3.connect":
                kept_files.about_to_change(args[0])
            elif event == "os.rename":
                kept_files.about_to_move(args[0])
                kept_files.about_to_write(args[1])
            elif event == "shutil.rmtree":
                kept_files.about_to_delete_all(args[0])
            elif args[1] == -1:  # else by a folder's number: of rmtree
                kept_files.about_to_delete(args[0])
        finally:
            LISTENING.append(kept_files)

    sys.addaudithook(heard)


@contextmanager
def files_kept(listed: Path) -> Iterator[None]:
    """Give back files that a script writes over or deletes inside; ``listed`` names them."""
    _hear_of_files()
    kept_files = KeptFiles(listed)
    LISTENING.append(kept_files)
    try:
        yield
    finally:
        LISTENING.remove(kept_files)
        give_back(listed)
