"""Captures a user's training script in a process of its own, and keeps what was captured."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from itercast.capture.base.cache_folder import cache_folder
from itercast.capture.input.lane import InputLane
from itercast.capture.programs.program import ProgramCapture, read_program
from itercast.compose.capture_model import CAPTURE, code_digest
from itercast.compose.pricing.collectives import gpus_per_domain
from itercast.compose.target import Target
from itercast.microbench.hardware.emulated import emulated
from itercast.microbench.hardware.machine import memory_bytes
from itercast.microbench.processes.leash import held
from itercast.microbench.processes.watch import never, session_bytes, watch

LEASH, MODULE = "itercast.microbench.processes.leash", "itercast.capture.programs.script"
MOST_MEMORY = 0.5  # of this machine's, for a script and what it starts


def captured_script(
    script: Path,
    arguments: Sequence[str],
    target: Target,
    world_size: int,
    steps: int,
    limit_s: int,
) -> tuple[ProgramCapture, InputLane | None]:
    """What a script launches in a step, and its DataLoader's lane; kept by all files it read.

    Its output goes to stderr. ValueError in one line where it cannot be captured, or not in
    ``limit_s`` seconds; all processes that it started are gone then.
    """
    order = {
        "script": str(script),
        "arguments": list(arguments),
        "steps": steps,
        "gpu": asdict(emulated(target.gpu)),
        "world_size": world_size,
        "per_node": gpus_per_domain(target.gpu, target.node),
    }
    key = repr((order, os.getcwd(), code_digest(CAPTURE)))
    path = cache_folder("programs") / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json.gz"
    known = path.with_suffix(".files")
    if known.is_file() and path.is_file() and _unchanged(json.loads(known.read_text())):
        return read_program(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    _run([MODULE, json.dumps(order), str(path)], script, limit_s)
    if not path.is_file():
        raise ValueError(f"{script.name}: no program was captured, it ended by itself")
    return read_program(path)


def _unchanged(digests: dict[str, str]) -> bool:
    """Whether files still have the contents that they had."""
    return all(_digest(Path(name)) == digest for name, digest in digests.items())


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _run(command: Sequence[str], script: Path, limit_s: int) -> None:
    """Run the capture; all that it started is gone when it ends, fails, takes too long or too much.

    That holds too when this process is killed meanwhile (``leash``).
    """
    most = MOST_MEMORY * memory_bytes()
    with held() as variables, TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", LEASH, *command],
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
    """The line in which a capture says why it ended, or the last one that it wrote."""
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    ours = [line for line in lines if line.startswith("itercast: ")]
    told = (ours or lines or [f"{script.name} ended with {code}"])[-1]
    return told.removeprefix("itercast: ")
