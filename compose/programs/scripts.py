"""Captures a user's training script in a process of its own, and keeps what was captured."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from itercast.capture.base.cache_folder import cache_folder
from itercast.capture.input.lane import InputLane
from itercast.capture.programs.gpus.asked import Answers
from itercast.capture.programs.program import ProgramCapture, read_program
from itercast.compose.capture_model import CAPTURE, code_digest
from itercast.compose.pricing.collectives import gpus_per_domain
from itercast.compose.target import Target
from itercast.microbench.hardware.emulated import emulated
from itercast.microbench.hardware.machine import memory_bytes
from itercast.microbench.processes.child_processes import START, held
from itercast.microbench.processes.watch import never, session_bytes, watch

MODULE = "itercast.capture.programs.script"
OURS = "itercast: "  # begins our lines among the script's
MOST_MEMORY = 0.5  # of this machine's, for a script and what it starts


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedScript:
    """What a script launches in a step, its DataLoader's lane, and whether both were kept."""

    program: ProgramCapture
    lane: InputLane | None
    kept: bool


def captured_script(
    script: Path,
    module: str,
    arguments: Sequence[str],
    target: Target,
    world_size: int,
    steps: int,
    limit_s: int,
    anew: bool = False,
) -> CapturedScript:
    """Capture a step of a script, or read the one that is kept, unless ``anew``.

    ``module``: its name, if it runs as ``python -m`` runs it; ``script`` is its file then.
    One is kept for as long as the script would find the same answers: files, folders, variables and
    the GPU's facts, as far as it asked for them. Its output goes to stderr. ValueError in one line
    where it cannot be captured, or not in ``limit_s`` seconds; all processes that it started are
    gone then.
    """
    gpu = emulated(target.gpu)
    order = {
        "script": str(script),
        "module": module,
        "arguments": list(arguments),
        "steps": steps,
        "world_size": world_size,
        "per_node": min(world_size, gpus_per_domain(target.gpu, target.node)),
    }
    key = _digest((order, gpu.kind, os.getcwd(), code_digest(CAPTURE), *_code(), *_packages()))
    folder = cache_folder("programs")
    for path in () if anew else sorted(folder.glob(f"{key}-*.json.gz")):
        known = path.with_suffix(".asked")
        if known.is_file() and Answers(**json.loads(known.read_text())).hold(gpu):
            program, lane = read_program(path)
            return CapturedScript(program=program, lane=lane, kept=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{key}-{os.getpid()}.json.gz"
    try:
        _run([MODULE, json.dumps(order | {"gpu": asdict(gpu)}), str(path)], script, limit_s)
        if not path.is_file():
            raise ValueError(f"{script.name}: no program was captured, it ended by itself")
        program, lane = read_program(path)
        _keep(path, folder / f"{key}-{_digest(path.with_suffix('.asked').read_text())}.json.gz")
    finally:
        for one in (path, path.with_suffix(".asked")):
            one.unlink(missing_ok=True)
    return CapturedScript(program=program, lane=lane, kept=False)


def module_file(name: str) -> Path:
    """The file that ``python -m name`` runs from this folder; nothing is imported."""
    folders, file, parts = [os.getcwd(), *sys.path], "", name.split(".")
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), folders)
        if spec is None:
            raise ValueError(f"module {name!r}: no such module in this folder or installed")
        folders, file = list(spec.submodule_search_locations or ()), str(spec.origin)
    return module_file(f"{name}.__main__") if folders else Path(file)


def _keep(path: Path, name: Path) -> None:
    """Give a capture and what it asked their names, the latter last."""
    path.replace(name)
    path.with_suffix(".asked").replace(name.with_suffix(".asked"))


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _code() -> list[bytes]:
    """Our code that runs scripts."""
    files = (path for room in ("programs", "input") for path in (CAPTURE / room).rglob("*.py"))
    return [path.read_bytes() for path in sorted(files)]


@cache
def _packages() -> list[str]:
    """Names and versions of all packages that are installed."""
    return sorted({f"{one.name} {one.version}" for one in distributions()})


def _run(command: Sequence[str], script: Path, limit_s: int) -> None:
    """Run the capture; all that it started is gone when it ends, fails, takes too long or too much.

    That holds too when this process is killed meanwhile (``child_processes``).
    """
    most = MOST_MEMORY * memory_bytes()
    with held() as variables, TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", START, *command],
            env=os.environ | variables,
            stdout=sys.__stderr__,
            stderr=said,
            start_new_session=True,
        )

        def check_memory() -> None:
            if (taken := session_bytes(process.pid)) > most:
                here = f"allowed are {most / 1e9:.1f} GB, {MOST_MEMORY:.0%} of this machine's"
                raise ValueError(f"{script.name} takes {taken / 1e9:.1f} GB of memory; {here}")

        how = watch(process, check_memory, never, time.monotonic() + limit_s)
        if how == "late":
            raise ValueError(f"{script.name} made too few steps within {limit_s} s")
        if process.returncode:
            raise ValueError(_reason(said, process.returncode, script))


def _reason(said: IO[bytes], code: int, script: Path) -> str:
    """The line in which a capture says why it ended, or the last one that the script wrote.

    Both where the script ended by itself: argparse, for one, says why.
    """
    said.seek(0)
    lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    ours = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
    others = [line.strip() for line in lines if not line.startswith(OURS)]
    if not ours:
        return (others or [f"{script.name} ended with {code}"])[-1]
    by_itself = f"{script.name} exits" in ours[-1] and others
    return f"{ours[-1]}: {others[-1]}" if by_itself else ours[-1]
