"""Options that name a file or a folder to write: refused before the work, not after it."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import typer

from itercast.capture.base.files import is_special, stream_of


def in_a_folder(path: Path | None) -> Path | None:
    """Check the file that an option names before any work: it can be written, its folder exists."""
    if path is None:
        return None
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{str(path)!r}: no such folder")
    try:
        _try_writing(path)
    except OSError as exc:
        problem = f"{str(path)!r}: nothing can be written there ({exc.strerror})"
        raise typer.BadParameter(problem) from None
    return path


def _try_writing(path: Path) -> None:
    """Raise OSError if ``write_atomic`` could not write the path; writes nothing itself.

    A regular file is replaced by a new file beside it, so its folder has to be writable.
    """
    if (stream := stream_of(path)) is not None:
        os.fstat(stream)
    elif not is_special(path):
        with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):
            pass
    elif not os.access(path, os.W_OK):  # opening a FIFO would wait for its reader
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def can_be_made(path: Path | str | None) -> Path | str | None:
    """Check that the folder an option names is writable or can be made; a URL is not checked."""
    if path is None or "://" in str(path):
        return path
    nearest = next(p for p in (Path(path), *Path(path).absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as exc:
        why = exc.strerror if nearest.is_dir() else f"{str(nearest)!r} is a file"
        problem = f"{str(path)!r}: nothing can be written there ({why})"
        raise typer.BadParameter(problem) from None
    return path


def folder_to_write(text: str) -> Any:
    """An option whose value is a folder to write, which is made where it is not there."""
    return typer.Option(help=text, callback=can_be_made)


def file_to_write(text: str) -> Any:
    """An option whose value is a file to write, in a folder that exists."""
    return typer.Option(help=text, dir_okay=False, callback=in_a_folder)
