"""Writes files so that readers never see a part of one."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

STREAM = re.compile(r"/(?:dev|proc/(self|\d+))/fd/(\d+)")  # Linux's, of a process
LINKS = 40  # no assumption: in a row, as Linux follows them


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file at once: readers see the old content or the new, never a part of it.

    Where the path is a symbolic link, the file that it leads to is replaced, not the link. A device
    or a FIFO is opened and written. A path of this process's output (/dev/stdout, or the file that
    it is redirected to) is written behind what was printed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    target = Path(os.path.realpath(path))
    try:
        if (stream := stream_of(path)) is not None:
            _print(stream, data)
        elif is_special(path) or target.is_symlink():  # a link that leads to itself: open says so
            path.write_bytes(data)
        else:
            _replace(target, data)
    except OSError as exc:  # such as a full disk; nobody knows the temporary name
        raise OSError(exc.errno, exc.strerror, str(path)) from exc


@contextmanager
def folder_at_once(folder: Path) -> Iterator[Path]:
    """A fresh folder to write, which replaces ``folder`` at the end of the context.

    Where what runs inside raises, ``folder`` stays as it was.
    """
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        yield fresh
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(fresh, folder)
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror or str(exc), str(folder)) from exc
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def real_path(file: str) -> str:
    """As ``os.path.realpath``, for many files of few folders: the path of each folder is kept."""
    folder, name = os.path.split(os.path.abspath(file))
    path = os.path.join(_real_folder(folder), name)
    return os.path.realpath(file) if ".." in file or os.path.islink(path) else path


@cache
def _real_folder(path: str) -> str:
    return os.path.realpath(path)


def stream_of(path: Path) -> int | None:
    """The number of this process's open file that a path names; None for other paths.

    Either by its name (/dev/stdout, /dev/fd/3, links to them), or because standard output or
    errors are redirected to this file (``> FILE``).
    """
    link = path
    for _ in range(LINKS):
        named = STREAM.fullmatch(os.path.abspath(link))
        if named and named[1] in (None, "self", str(os.getpid())):
            return int(named[2])
        if not link.is_symlink():
            break
        link = link.parent / os.readlink(link)
    if not path.is_file():
        return None
    return next((n for n in (1, 2) if _is_open_as(path, n)), None)


def _is_open_as(path: Path, number: int) -> bool:
    """Whether the open file of this number is the file at a path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(number))
    except OSError:  # closed
        return False


def _print(stream: int, data: bytes) -> None:
    """Write to an open file, after flushing what Python has buffered for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.dup(stream), "wb") as file:
        file.write(data)


def is_special(path: Path) -> bool:
    """Whether a path exists and is no regular file: a device, a FIFO, a folder."""
    return path.exists() and not path.is_file()


def _replace(target: Path, data: bytes) -> None:
    """Replace a file by writing a new one beside it and renaming that; also for a new file."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
