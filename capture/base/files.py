"""Writes files so that readers never see a part of one."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file at once: readers see the old content or the new, never a part of it.

    Where the path is a symbolic link, the file that it leads to is replaced, not the link. A device
    or a FIFO is opened and written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    target = Path(os.path.realpath(path))
    try:
        if is_special(path) or target.is_symlink():  # a link that leads to itself: open says so
            path.write_bytes(data)
        else:
            _replace(target, data)
    except OSError as exc:  # such as a full disk; nobody knows the temporary name
        raise OSError(exc.errno, exc.strerror, str(path)) from exc


def is_special(path: Path) -> bool:
    """Whether a path leads to what is there and no regular file: a device, a FIFO, a folder."""
    return path.exists() and not path.is_file()


def _replace(target: Path, data: bytes) -> None:
    """Write beside a regular file, or one that is not there yet, then put it in its place."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
