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
    """Parses an option that names a file to write: its folder has to exist."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{str(path)!r}: no such folder")
    if path is not None:  # said now, not after the work
        try:
            _try_writing(path)
        except OSError as exc:
            told = f"{str(path)!r}: nothing can be written there ({exc.strerror})"
            raise typer.BadParameter(told) from None
    return path


def _try_writing(path: Path) -> None:
    """OSError where ``write_atomic`` may write neither this device nor beside this file."""
    if (stream := stream_of(path)) is not None:
        os.fstat(stream)
    elif not is_special(path):
        with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):
            pass
    elif not os.access(path, os.W_OK):  # opening a FIFO would wait for its reader
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def can_be_made(path: Path | str | None) -> Path | str | None:
    """Parses an option that names a folder to write: it is there, or can be made; or a URL."""
    if path is not None and "://" not in str(path):
        there = next(p for p in (Path(path), *Path(path).absolute().parents) if p.exists())
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as exc:
            why = exc.strerror if there.is_dir() else f"{str(there)!r} is a file"
            told = f"{str(path)!r}: nothing can be written there ({why})"
            raise typer.BadParameter(told) from None
    return path


def folder_to_write(text: str) -> Any:
    """An option whose value is a folder to write, which is made where it is not there."""
    return typer.Option(help=text, callback=can_be_made)


def file_to_write(text: str) -> Any:
    """An option whose value is a file to write, in a folder that exists."""
    return typer.Option(help=text, dir_okay=False, callback=in_a_folder)
