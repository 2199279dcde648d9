"""Dataset roots at URLs (s3, gs, http, file): parts and cards are fetched, and sent whole.

Credentials come from the environment, as each store's client reads them there.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from itercast.capture.base.cache_folder import cache_folder
from itercast.capture.base.files import write_atomic
from itercast.microbench import store

log = logging.getLogger(__name__)
T = TypeVar("T")
PROTOCOLS = ("file", "s3", "gs", "http", "https")
READ_ONLY = ("http", "https")
NAME = r"[\w+-][\w.+-]*"
OF_ROOT = re.compile(rf"{NAME}/{NAME}/{NAME}/(part-[\w.+-]+\.parquet|card\.yaml)")
PROBE = ".fleet/probe"  # written by each command on this root
TRIES = 6  # of a request that fails
NO_RETRIES = {
    "config_kwargs": {"retries": {"max_attempts": 0}}
}  # by the client: we repeat, and say so
FIRST_WAIT_S = 0.5  # after it, doubled each time


def is_url(text: str) -> bool:
    """Whether a text is a URL and not a path."""
    return "://" in text


def check_url(text: str) -> str:
    """The root, a path or a URL of a known kind; ValueError for others, or with credentials."""
    if not is_url(text):
        return text
    parts = urlsplit(text)
    if "@" in parts.netloc or parts.query:
        shown = f"{parts.scheme}://...{parts.path}"
        raise ValueError(f"root {shown!r}: credentials belong to the environment, not to a URL")
    if parts.scheme not in PROTOCOLS:
        raise ValueError(f"root {text!r}: allowed are paths and {', '.join(PROTOCOLS)}")
    return text


class Root:
    """A dataset root at a URL or a path. Requests are repeated; what was sent is read back."""

    def __init__(self, where: str) -> None:
        self.where = check_url(where)
        from fsspec.core import url_to_fs  # lazy: forecasts do without

        try:
            path = where if is_url(where) else str(Path(where).resolve())
            self.fs, self.base = url_to_fs(path, **(NO_RETRIES if path.startswith("s3://") else {}))
            self.fs.retries = 1
        except ImportError as exc:
            raise ValueError(f"root {where!r}: {exc}; pip install 'itercast[fleet]'") from exc
        except (ValueError, RuntimeError, OSError) as exc:  # links that point at each other, too
            raise ValueError(f"root {where!r}: {_one_line(exc)}") from exc
        protocols = [self.fs.protocol] if isinstance(self.fs.protocol, str) else self.fs.protocol
        self.local = "file" in protocols
        self._own_folder = Path(self.base) if self.local else None

    def names(self, below: str = "") -> set[str]:
        """Names of all files under the root, or under a folder of it."""
        self.fs.invalidate_cache()
        whole = f"{self.base}/{below}".rstrip("/")
        found = self._repeated(f"list {below or '/'}", lambda: self._find(whole))
        return {str(name)[len(self.base) :].lstrip("/") for name in found}

    def _find(self, folder: str) -> list[str]:
        try:
            return list(self.fs.find(folder))
        except FileNotFoundError:
            return []

    def get(self, name: str) -> bytes:
        """Content of a file."""
        return self._repeated(
            f"read {name}", lambda: bytes(self.fs.cat_file(f"{self.base}/{name}"))
        )

    def put(self, name: str, data: bytes) -> None:
        """Write a file whole; readers see all of it or nothing."""
        if urlsplit(self.where).scheme in READ_ONLY:
            raise ValueError(f"root {self.where!r}: http is read-only")
        self._repeated(f"write {name}", lambda: self._put_once(name, data))

    def _put_once(self, name: str, data: bytes) -> None:
        if self._own_folder is not None:
            write_atomic(self._own_folder / name, data)
            return
        self.fs.pipe_file(f"{self.base}/{name}", data)
        if self.fs.cat_file(f"{self.base}/{name}") != data:
            raise OSError("another content was read back")

    def _repeated(self, what: str, request: Callable[[], T]) -> T:
        """What the request returns; one that fails is logged and repeated, for half a minute."""
        wait_s = FIRST_WAIT_S
        for left in reversed(range(TRIES)):
            try:
                return request()
            except (FileNotFoundError, PermissionError):
                raise
            except Exception as exc:  # clients raise errors of many kinds
                told = f"{what} at {self.where!r}: {type(exc).__name__}: {_one_line(exc)}"
                if not left or self.local:
                    raise OSError(told) from exc
                log.warning("%s; again in %.1f s", told, wait_s)
            time.sleep(wait_s)
            wait_s *= 2
        raise AssertionError  # not reached

    def check(self) -> None:
        """Write and read a small file; ValueError says why that cannot be done."""
        try:
            self._put_once(PROBE, b"itercast")
        except Exception as exc:  # as above
            raise ValueError(f"root {self.where!r} cannot be written: {_one_line(exc)}") from exc


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:200] or type(exc).__name__


def fetched(where: str) -> Path:
    """A local copy of a root: the path itself, or the URL's parts in the cache folder."""
    if not is_url(where):
        return Path(where)
    folder = _copy_of("roots", where)
    there = _mirror(Root(where), folder)
    if not there:
        raise ValueError(f"root {where!r}: no rows there")
    for path in folder.glob("*/*/*/part-*.parquet"):  # of a root that was emptied meanwhile
        if path.relative_to(folder).as_posix() not in there:
            path.unlink()
    return folder


@contextmanager
def written(where: str) -> Iterator[Path]:
    """A local root to write to; for a URL, a copy whose new parts are sent at the end.

    They are sent after errors, too.
    """
    if not is_url(where):
        yield Path(where)
        return
    root, folder = Root(where), _copy_of("written", where)
    root.check()
    _mirror(root, folder)  # a sweep repeats no point that is there
    try:
        yield folder
    finally:
        sent(folder, where)


def fetched_file(where: str) -> Path:
    """A local copy of a file at a URL, and of its numbered pieces; a path is the file itself."""
    if not is_url(where):
        return Path(where)
    folder, _, name = where.rpartition("/")
    root, copy = Root(folder), _copy_of("files", folder)
    pieces = re.compile(re.escape(re.sub(r"\.\d{3}$", "", name)) + r"(\.\d{3})?")
    for found in (n for n in root.names() if pieces.fullmatch(n)):
        write_atomic(copy / found, root.get(found))
    return copy / name


def _copy_of(what: str, where: str) -> Path:
    return cache_folder(what) / hashlib.sha256(where.encode()).hexdigest()[:16]


def _mirror(root: Root, folder: Path) -> set[str]:
    """Fetch the parts that a local copy lacks, and the cards; returns the names of all.

    Parts are immutable; a folder that gets new ones gets a new card.
    """
    there = {name for name in root.names() if OF_ROOT.fullmatch(name)}
    missing = [n for n in there if not (folder / n).is_file() or n.endswith("card.yaml")]
    for name in missing:
        write_atomic(folder / name, root.get(name))
    for changed in {(folder / n).parent for n in missing if n.endswith(".parquet")}:
        store.write_card(changed)
    return there


def sent(folder: Path, where: str) -> int:
    """Send a local root's parts to a URL, those that are missing there, and write its cards.

    Returns the number of parts.
    """
    root = Root(where)
    there = root.names()
    parts = sorted(p.relative_to(folder).as_posix() for p in folder.glob("*/*/*/part-*.parquet"))
    new = [name for name in parts if name not in there]
    for name in new:
        root.put(name, (folder / name).read_bytes())
    if new:
        folders = {name.rpartition("/")[0] for name in new}
        for card in (f"{name}/card.yaml" for name in sorted(folders)):
            if card not in there and (folder / card).is_file():  # has what old parts do not state
                root.put(card, (folder / card).read_bytes())
        send_cards(where, folders)
    return len(new)


def send_cards(where: str, folders: set[str]) -> None:
    """Write the cards of these folders of a root from the parts there."""
    copy = fetched(where)
    for name in sorted(folders):
        store.write_card(copy / name)
        if is_url(where):
            Root(where).put(f"{name}/card.yaml", (copy / name / "card.yaml").read_bytes())
