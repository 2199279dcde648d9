"""Captures a user's training script in a process of its own, and keeps what was captured."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO
from warnings import catch_warnings

from itercast.capture.base.cache_folder import bounded, cache_folder, digest_of_code
from itercast.capture.input.lane import InputLane
from itercast.capture.programs.gpus.asked import Answers, EmulatedGpu
from itercast.capture.programs.kept_files import KEPT, give_back
from itercast.capture.programs.program import ProgramCapture, read_program
from itercast.capture.programs.reports.progress import PROGRESS
from itercast.capture.programs.trained.facts import STOPS
from itercast.compose.capture_model import CAPTURE
from itercast.compose.parallel.placement import gpus_per_domain, host_cores
from itercast.compose.target import Target
from itercast.microbench.hardware.machine import memory_bytes
from itercast.microbench.hardware.spec import COMPUTE_CAPABILITY, Gpu
from itercast.microbench.processes.fork_server import Fork
from itercast.microbench.processes.watch import session_bytes
from itercast.microbench.store import Facts

MODULE = "itercast.capture.programs.script"
POLL_S, MEMORY_S = 0.1, 1.0  # no assumption: seconds between looks at a file, at memory
LAST_BYTES = 1 << 16  # of what a script wrote, among which is what it does
# Begins the last line of a traceback, in C++ too.
ERROR = re.compile(r"[\w.]*(Error|Exception): |what\(\): ")
OURS = "itercast: "  # begins our lines among the script's
PATIENT_FRAC = 1 / 3  # of the limit, in which what an iteration runs once comes again
LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("accelerate", "accelerate.commands.launch", "deepspeed", "deepspeed.launcher.runner"),
)
MOST_MEMORY = 0.5  # of this machine's, for a script and what it starts


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedScript:
    """What a script launches in a step, its DataLoader's lane, and whether both were kept."""

    program: ProgramCapture
    lane: InputLane | None
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOrder:
    """How to run a script as rank 0 of ``world_size``.

    ``module``: its name, if it is run as ``python -m`` does; ``path`` is then its file. It runs for
    ``steps`` steps, of which the last is captured, or ``limit_s`` seconds; ``anew``: even if a
    capture is kept. ``tell`` gets lines about its progress.
    """

    path: Path
    module: str = ""
    arguments: Sequence[str] = ()
    target: Target
    world_size: int = 1
    steps: int = 3
    limit_s: int = 600
    anew: bool = False
    tell: Callable[[ScriptOrder, str], object] = field(default=lambda *told: None, compare=False)

    def __post_init__(self) -> None:
        if (name := self.module or self.path.name) in LAUNCHERS:
            allowed = "allowed is the script that it starts, with that one's arguments"
            raise ValueError(f"script {name!r} starts processes for others, {allowed}")
        if not self.path.is_file():
            why = "is a folder, allowed is a file" if self.path.is_dir() else "no such file"
            raise ValueError(f"script {str(self.path)!r}: {why}")
        try:  # now, not once its process has started
            with catch_warnings(action="ignore"):
                compile(self.path.read_bytes(), str(self.path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as exc:  # ValueError: zeros, in newer versions of Python
            line = f" (line {exc.lineno})" if isinstance(exc, SyntaxError) and exc.lineno else ""
            why = f"is no Python, {exc.msg if isinstance(exc, SyntaxError) else exc}{line}"
            raise ValueError(f"script {str(self.path)!r} {why}") from None

    def facts(self, serve: str = "") -> Facts:
        """What the capturing process is given; ``serve``: see ``programs.script.main``."""
        gpu, node = self.target.gpu, self.target.node
        return {
            "script": str(self.path),
            "module": self.module,
            "arguments": list(self.arguments),
            "steps": self.steps,
            "patience_s": PATIENT_FRAC * self.limit_s,
            "world_size": self.world_size,
            "per_node": min(self.world_size, gpus_per_domain(gpu, node)),
            "serve": serve,
        }

    def emulated(self) -> EmulatedGpu:
        """What the script finds of a GPU and its host."""
        gpu, node = self.target.gpu, self.target.node
        return emulated(gpu, host_cores(node, self.world_size), self.facts("")["per_node"])

    def key(self, serve: bool = False) -> str:
        """A digest of this order, and of the code that runs here."""
        facts = self.facts("serve" if serve else "")
        code = (digest_of_code(CAPTURE), *_packages())
        return digest((facts, self.target.gpu.kind, os.getcwd(), *code))

    def kept(self, key: str) -> Path | None:
        """The capture kept under a key, if the script would find the same answers here now."""
        gpu = self.emulated()
        for path in () if self.anew else sorted(cache_folder("programs").glob(f"{key}-*.json.gz")):
            known = path.with_suffix(".asked")
            if known.is_file() and Answers(**json.loads(known.read_text())).hold(gpu):
                return path
        return None

    def command(self, result: Path, serve: str = "") -> list[str]:
        """Arguments of ``itercast.capture.programs.script``, which writes its capture to a file."""
        facts = {**self.facts(serve), "gpu": asdict(self.emulated())}
        return [json.dumps(facts), str(result)]


def capturing(order: ScriptOrder, share: float = 1.0) -> Generator[None, None, CapturedScript]:
    """Capture a step of a script, or read the one that is kept, unless ``anew``.

    A kept capture is valid while the script would find the same files, folders, variables and facts
    of the GPU, as far as it asked for them. Yields while the script runs; its output goes to
    stderr, and all its processes are gone afterwards. ValueError in one line if it cannot be
    captured, or not in time, or not in ``share`` of the memory that scripts may take.
    """
    key = order.key()
    path, made = order.kept(key), False
    if path is None:
        with fresh_path(key) as fresh:
            with ScriptProcess(order, order.command(fresh), share) as process:
                yield from process.ends()
            if not fresh.is_file():
                raise ValueError(f"{order.path.name}: no program was captured, it ended by itself")
            path, made = keep(fresh, key), True
    program, lane = read_program(path)
    return CapturedScript(program=program, lane=lane, kept=not made)


@contextmanager
def fresh_path(key: str) -> Iterator[Path]:
    """A path for a capture until it is kept; files left there, ``.asked`` too, are removed."""
    folder = cache_folder("programs")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{key}-{os.getpid()}.json.gz"
    try:
        yield path
    finally:
        for file in (path, path.with_suffix(".asked")):
            file.unlink(missing_ok=True)


def keep(path: Path, key: str) -> Path:
    """Rename a finished capture, then the file of what the script asked; returns the capture."""
    name = path.parent / f"{key}-{digest(path.with_suffix('.asked').read_text())}.json.gz"
    path.replace(name)
    path.with_suffix(".asked").replace(name.with_suffix(".asked"))
    bounded(name.parent)
    return name


def module_file(name: str) -> Path:
    """The file that ``python -m name`` would run from this folder; imports nothing."""
    folders, file, parts = [os.getcwd(), *sys.path], "", name.split(".")
    for i in range(len(parts)):
        spec = PathFinder.find_spec(parts[i], folders)  # without its parents, not imported yet
        if spec is None:
            raise ValueError(f"module {name!r}: no such module in this folder or installed")
        folders, file = list(spec.submodule_search_locations or ()), str(spec.origin)
    return module_file(f"{name}.__main__") if folders else Path(file)


def digest(value: object) -> str:
    """A short digest of plain values."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


@cache
def _packages() -> list[str]:
    """Names and versions of all packages that are installed, as their folders are named."""
    folders = [Path(folder) for folder in sys.path if os.path.isdir(folder)]
    return sorted({info.name for folder in folders for info in folder.glob("*-info")})


class ScriptStopsError(ValueError):
    """Raised where the script itself does not go on, so that as another rank it may."""


class TooMuchMemoryError(ValueError):
    """Raised where a script takes more memory than its share; it may run later, with more."""


@contextmanager
def _exits_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that contexts close; unless they are handled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    unhandled = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in unhandled:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


class ScriptProcess:
    """A process that captures a script; it and all that it started are gone when this closes.

    That holds too when this process is killed meanwhile (``fork_server``). So is the folder of
    its temporary files, unless TMPDIR says where they are.
    """

    def __init__(self, order: ScriptOrder, command: Sequence[str], share: float = 1.0) -> None:
        self.script, self.limit_s = order.path, order.limit_s
        self._tell = partial(order.tell, order)
        self._most_frac = share * MOST_MEMORY
        self._command, self._stack = command, ExitStack()

    def __enter__(self) -> ScriptProcess:
        with self._stack as stack:
            self._output = stack.enter_context(TemporaryFile())
            folder = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
            stack.callback(give_back, Path(folder, KEPT))  # once the process is killed
            stack.enter_context(_exits_on_signals())
            self.process = Fork(MODULE, [*self._command, folder], 2, self._output.fileno())
            stack.callback(self.process.end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def ends(self) -> Iterator[None]:
        """Yield until it ends; ValueError where it fails, takes too long or too much."""
        return self._watch(lambda: self.process.poll() is not None)

    def written(self, *paths: Path) -> None:
        """Wait until the script writes one of some files.

        ValueError as for ``ends``, and where it ends without.
        """
        for _ in self._watch(lambda: any(path.is_file() for path in paths)):
            time.sleep(POLL_S)
        if not any(path.is_file() for path in paths):
            raise ValueError(f"{self.script.name} ended by itself")

    def _watch(self, done: Callable[[], bool]) -> Iterator[None]:
        """Yield until ``done`` or the process ends; checks its memory and time once a second."""
        most_bytes, now_s = self._most_frac * memory_bytes(), time.monotonic()
        end_s, next_check_s = now_s + self.limit_s, now_s
        while not done() and self.process.poll() is None:
            yield
            if (now_s := time.monotonic()) < next_check_s:
                continue
            next_check_s = now_s + MEMORY_S
            taken_bytes = session_bytes(self.process.pid) if self.process.pid else 0
            if taken_bytes > most_bytes:
                allowed = f"{most_bytes / 1e9:.1f} GB, {self._most_frac:.0%} of this machine's"
                taken = f"{self.script.name} takes {taken_bytes / 1e9:.1f} GB of memory"
                raise TooMuchMemoryError(f"{taken}; allowed are {allowed}")
            if doing := self._doing():
                self._tell(doing)
            if now_s > end_s:
                late = f"{self.script.name} made too few steps within {self.limit_s} s (--limit)"
                raise ValueError(f"{late}: {doing}" if doing else late)
        if code := self.process.poll():
            kind = ScriptStopsError if code == STOPS else ValueError
            raise kind(_reason(self._output, code, self.script))

    def _doing(self) -> str:
        """What the script does, as its process said last."""
        file = self._output.fileno()  # pread, as the process shares its position
        tail = os.pread(file, LAST_BYTES, max(0, os.fstat(file).st_size - LAST_BYTES))
        lines = tail.decode(errors="replace").splitlines()
        return next((x.removeprefix(PROGRESS) for x in lines[::-1] if x.startswith(PROGRESS)), "")


def _reason(output: IO[bytes], code: int, script: Path) -> str:
    """Why a capture ended: our own line of its output, or the last line of the script.

    Both if the script ended by itself: argparse or a traceback then says why, even if the script
    went on to its end after that.
    """
    output.seek(0)
    text = output.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if re.search(r"\w", line)]  # no frame of a box
    ours = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
    of_script = [line.strip(" \u2502") for line in lines if not line.startswith((OURS, PROGRESS))]
    errors = [line for line in of_script if ERROR.match(line)]
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
    reason = ours[-1] if ours else f"{script.name} ended {how}"
    if not ours or f"{script.name} exits" in reason:  # by itself, with a code
        why = (errors or of_script)[-1:]
    else:
        why = errors[-1:] if f"{script.name} ends" in reason else []
    return ": ".join([reason, *why])


def emulated(gpu: Gpu, cores_of_a_rank: float = 0, per_node: int = 1) -> EmulatedGpu:
    """The facts that programs can ask of a GPU; Hopper's where its architecture is unknown."""
    return EmulatedGpu(
        name=f"NVIDIA {gpu.name.upper()}",  # scripts look for "H100" in it
        kind=gpu.kind,
        memory_bytes=int(gpu.hbm_bytes),
        sm_count=int(gpu.sm_count),
        compute_capability=COMPUTE_CAPABILITY.get(gpu.architecture, (9, 0)),
        host_cores=round(cores_of_a_rank * per_node) if gpu.kind == "gpu" else 0,
        l2_bytes=int(gpu.l2_bytes),
    )
