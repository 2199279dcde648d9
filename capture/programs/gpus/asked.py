"""What a script asks of the machine it runs on: a kept capture is valid while all answers are the
same.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from stat import S_ISDIR
from types import FrameType
from typing import Any
from unittest.mock import patch

SMALL_BYTES = 2**20  # up to which a file's content counts; of larger ones size and time do
READ = {"open": 0, "os.listdir": 0, "os.scandir": 0}  # audited events -> the path among arguments
SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/")
SET_HERE = ("ITERCAST_PARENT", "TORCHINDUCTOR_CACHE_DIR")  # variables of this process, by us, torch
READ_ALL = ("popitem", "__iter__")  # functions that read every variable, whatever its name
EMPTY = hashlib.sha256(b"[]").hexdigest()[:16]  # ``_digest`` of an empty folder
WRITES = os.O_WRONLY | os.O_RDWR
BY_PYTHON = {"os", "genericpath", "posixpath", "pathlib"}  # modules that look at files for others


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedGpu:
    """What programs can ask of a GPU that is not there, and of its host; ``kind``: "gpu", "cpu".

    ``host_cores``: CPU cores of the node, 0 for those of this machine.
    """

    name: str
    kind: str
    memory_bytes: int
    sm_count: int
    compute_capability: tuple[int, int]
    host_cores: int = 0
    l2_bytes: int = 0


@dataclass(slots=True)
class Answers:
    """What a script found on its machine: digests of files and environment variables by name, and
    facts about the GPU. A kept capture is valid while they ``hold``.

    ``seen``: what its own code saw of files that it may not have read: whether they are there, how
    large they are.
    """

    files: dict[str, str] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    gpu: dict[str, Any] = field(default_factory=dict)

    def hold(self, gpu: EmulatedGpu) -> bool:
        """Whether a script would find the same now, on such a GPU."""
        return (
            all(_digest(Path(name)) == known for name, known in self.files.items())
            and all(_still(name, known) for name, known in self.seen.items())
            and all(_variable(os.environ, name) == known for name, known in self.variables.items())
            and all(_plain(getattr(gpu, name)) == known for name, known in self.gpu.items())
        )


class Asked:
    """Stands in for an ``EmulatedGpu`` and notes what a script asks of it and of the machine.

    Facts of the GPU are attributes; files and variables are noted inside ``noted``.
    """

    def __init__(self, gpu: EmulatedGpu) -> None:
        self._gpu, self._answers = gpu, Answers()
        self._files, self._before = set[str](), dict(os.environ)
        self._seen = dict[str, tuple[str, str]]()  # by path what was seen first, and whose code did

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._gpu, name)
        self._answers.gpu[name] = _plain(value)
        return value

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note files and folders that are read from here on, and inside the context variables and
        files that are looked at.
        """
        files, variables = self._files, self._answers.variables
        original_getitem, before, original_stat = os._Environ.__getitem__, self._before, os.stat
        original_keys = os._Environ.keys
        copies: tuple[object, int] = None, 0  # what asked for all names last, maybe for values, too

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            """Note the path of an event that reads, as Python's audit hooks are called."""
            if event not in READ:  # of which there are millions
                return
            path = arguments[READ[event]]
            if isinstance(path, str | bytes | os.PathLike) and not (
                event == "open" and (arguments[2] or 0) & WRITES
            ):
                files.add(os.path.abspath(os.fsdecode(path)))

        def keys(environment: Any) -> Any:
            nonlocal copies
            copies = _instruction(sys._getframe(1))
            return original_keys(environment)

        def getitem(environment: Any, name: str) -> Any:
            text, asker = os.fsdecode(name), sys._getframe(1)  # ``os.environb`` asks in bytes
            reads_all = asker.f_code.co_name in READ_ALL or _instruction(asker) == copies
            if not reads_all and text not in SET_HERE:
                variables[text] = _variable(before, text)
            return original_getitem(environment, name)

        def stat(path: Any, **options: Any) -> os.stat_result:
            if isinstance(path, str | bytes | os.PathLike):
                name = os.path.abspath(os.fsdecode(path))
                if name not in self._seen:
                    self._seen[name] = _sight(name, original_stat), _asker(sys._getframe(1))
            return original_stat(path, **options)

        sys.addaudithook(audit)
        environment = patch.multiple(os._Environ, __getitem__=getitem, keys=keys)
        follow = {*os.supports_follow_symlinks, stat}  # which shutil asks
        with environment, patch.multiple(os, stat=stat, supports_follow_symlinks=follow):
            yield

    def so_far(self) -> tuple[Answers, set[str], dict[str, tuple[str, str]]]:
        """What was asked until now, to be told to the same in another process (``hear``)."""
        return self._answers, self._files, self._seen

    def hear(self, told: tuple[Answers, set[str], dict[str, tuple[str, str]]]) -> None:
        """Take what was asked in another process as asked here."""
        answers, files, seen = told
        self._seen = seen | self._seen
        self._answers.gpu |= answers.gpu
        self._answers.variables |= answers.variables
        self._files |= files

    def answers(self, modules: set[str], installed: tuple[str, ...]) -> dict[str, Any]:
        """The ``Answers`` as plain values, with digests of imported ``modules`` (files).

        What the script made or removed counts as it left it: a folder named by the time of its run.
        Files of the system are left out, and those of packages, which are below ``installed``; so
        is what packages looked at.
        """
        skipped = (*SYSTEM, *installed)
        own = {name for name in self._files | modules if not name.startswith(skipped)}
        names = sorted(name for name in own if name in self._files or Path(name).is_file())
        self._answers.files = {name: _digest(Path(name)) for name in names}
        self._answers.seen = {
            name: sight if _still(name, sight) else _sight(name, os.stat)
            for name, (sight, asker) in self._seen.items()
            if not (name.startswith(skipped) or asker.startswith(("<", *skipped)))
        }
        return asdict(self._answers)


def _plain(value: Any) -> Any:
    """A value as JSON reads it again: a tuple as a list."""
    return list(value) if isinstance(value, tuple) else value


def _instruction(frame: FrameType) -> tuple[object, int]:
    """What a frame runs now: ``dict(os.environ)`` is one instruction, a loop over names several."""
    return frame.f_code, frame.f_lasti


def _asker(frame: FrameType | None) -> str:
    """The file of the code that looks at a file, through functions of Python's ``os`` or not."""
    while frame and frame.f_globals.get("__name__") in BY_PYTHON:
        frame = frame.f_back
    return frame.f_code.co_filename if frame else ""


def _still(name: str, known: str) -> bool:
    """Whether a path looks as it did; an empty folder is as none, which the script itself made."""
    sight = _sight(name, os.stat)
    return sight == known or (sight == "folder" and not known and _digest(Path(name)) == EMPTY)


def _sight(name: str, stat: Callable[[str], os.stat_result]) -> str:
    """Whether a path is a folder, or a file and of which size; "" for neither."""
    try:
        facts = stat(name)
    except (OSError, ValueError):
        return ""
    return "folder" if S_ISDIR(facts.st_mode) else f"{facts.st_size} bytes"


def _variable(variables: Any, name: str) -> str:
    """A digest of a variable's value, which may be a secret; empty for none."""
    value = variables.get(name)
    return "" if value is None else hashlib.sha256(value.encode()).hexdigest()[:16]


def _digest(path: Path) -> str:
    """A digest of a file's content or of a folder's names; the size and time of large ones."""
    try:
        facts = path.stat()
        if facts.st_size > SMALL_BYTES:
            return f"{facts.st_size} bytes at {facts.st_mtime_ns}"
        data = repr(sorted(os.listdir(path))).encode() if path.is_dir() else path.read_bytes()
        return hashlib.sha256(data).hexdigest()[:16]
    except (OSError, ValueError):
        return ""
