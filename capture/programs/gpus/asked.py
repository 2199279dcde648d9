"""What a script asks of the machine it runs on: a kept capture is valid while all answers are the
same.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

SMALL_BYTES = 2**20  # up to which a file's content counts; of larger ones size and time do
READ = {"open": 0, "os.listdir": 0, "os.scandir": 0}  # audited events -> the path among arguments
SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/")
SET_HERE = ("ITERCAST_PARENT", "TORCHINDUCTOR_CACHE_DIR")  # variables of this process, by us, torch
READ_ALL = ("copy", "popitem", "__iter__")  # functions that read every variable, whatever its name
WRITES = os.O_WRONLY | os.O_RDWR


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


@dataclass(slots=True)
class Answers:
    """What a script found on its machine: digests of files and environment variables by name, and
    facts about the GPU. A kept capture is valid while they ``hold``.
    """

    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    gpu: dict[str, Any] = field(default_factory=dict)

    def hold(self, gpu: EmulatedGpu) -> bool:
        """Whether a script would find the same now, on such a GPU."""
        return (
            all(_digest(Path(name)) == known for name, known in self.files.items())
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

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._gpu, name)
        self._answers.gpu[name] = _plain(value)
        return value

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note files and folders that are read from here on, and variables inside the context."""
        files, variables = self._files, self._answers.variables
        original_getitem, before = os._Environ.__getitem__, self._before

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            """Note the path of an event that reads, as Python's audit hooks are called."""
            if event not in READ:  # of which there are millions
                return
            path = arguments[READ[event]]
            if isinstance(path, str | bytes | os.PathLike) and not (
                event == "open" and (arguments[2] or 0) & WRITES
            ):
                files.add(os.path.abspath(os.fsdecode(path)))

        def getitem(environment: Any, name: str) -> Any:
            text = os.fsdecode(name)  # ``os.environb`` asks in bytes
            if sys._getframe(1).f_code.co_name not in READ_ALL and text not in SET_HERE:
                variables[text] = _variable(before, text)
            return original_getitem(environment, name)

        sys.addaudithook(audit)
        with patch.object(os._Environ, "__getitem__", getitem):
            yield

    def so_far(self) -> tuple[Answers, set[str]]:
        """What was asked until now, to be told to the same in another process (``hear``)."""
        return self._answers, self._files

    def hear(self, told: tuple[Answers, set[str]]) -> None:
        """Take what was asked in another process as asked here."""
        answers, files = told
        self._answers.gpu |= answers.gpu
        self._answers.variables |= answers.variables
        self._files |= files

    def answers(self, modules: set[str], installed: tuple[str, ...]) -> dict[str, Any]:
        """The ``Answers`` as plain values, with digests of imported ``modules`` (files).

        Files of the system are left out, and those of packages, which are below ``installed``.
        """
        skipped = (*SYSTEM, *installed)
        own = {name for name in self._files | modules if not name.startswith(skipped)}
        names = sorted(name for name in own if name in self._files or Path(name).is_file())
        self._answers.files = {name: _digest(Path(name)) for name in names}
        return asdict(self._answers)


def _plain(value: Any) -> Any:
    """A value as JSON reads it again: a tuple as a list."""
    return list(value) if isinstance(value, tuple) else value


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
