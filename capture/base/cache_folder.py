"""Where captures and other things that can be made again are kept: the platform's cache folder."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from itercast.capture.base.files import write_atomic

log = logging.getLogger(__name__)
R = TypeVar("R")
MOST_BYTES = 2**29  # of the files that are kept in a folder
VARIABLE = "ITERCAST_CACHE"  # environment variable that names another folder


def cache_folder(name: str) -> Path:
    """The folder of this name in $ITERCAST_CACHE, else in the platform's cache folder."""
    if own := os.environ.get(VARIABLE):
        return Path(own) / name
    return _platform_folder() / "itercast" / name


def _platform_folder() -> Path:
    """Where programs keep caches on macOS, Windows and Linux."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def packed(values: Any) -> bytes:
    """Plain values as gzip JSON, which is read without any library of ours and never executed."""
    return gzip.compress(json.dumps(values).encode(), 3)


def unpacked(data: bytes) -> Any:
    """The values that ``packed`` wrote; ValueError for anything else."""
    try:
        return json.loads(gzip.decompress(data))
    except (OSError, EOFError, zlib.error, RecursionError) as exc:
        raise ValueError(f"no gzip JSON: {exc}") from exc


def kept(
    path: Path,
    make: Callable[[], R],
    dumps: Callable[[R], bytes] = packed,
    loads: Callable[..., R] = unpacked,
) -> R:
    """Read a value from a file; where that fails, make it and write it there.

    ``dumps`` and ``loads`` turn the value into bytes and back; a file for which ``loads`` raises
    ValueError is written anew. Where nothing can be written the value is made every time.
    """
    try:
        return loads(path.read_bytes())
    except (OSError, ValueError):
        value = make()
    try:
        write_atomic(path, dumps(value))
        bounded(path.parent)
    except OSError as exc:
        log.warning("%s are not kept: %s", path.parent.name, exc)
    return value


@cache
def bounded(folder: Path) -> None:
    """Remove the oldest files of a folder beyond ``MOST_BYTES``, once in a process."""
    with suppress(FileNotFoundError):  # another process does the same
        stats = {path: path.stat() for path in folder.iterdir() if path.is_file()}
        total_bytes = 0
        for path in sorted(stats, key=lambda path: stats[path].st_mtime_ns, reverse=True):
            total_bytes += stats[path].st_size
            if total_bytes > MOST_BYTES:
                path.unlink()


@cache
def digest_of_code(*folders: Path) -> str:
    """Digest of all code and data files below folders, on which what is kept depends."""
    paths = [path for folder in folders for path in sorted(folder.rglob("*"))]
    files = [path for path in paths if path.suffix in (".py", ".yaml")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@cache
def installed(package: str) -> str:
    """The version of a package; empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
