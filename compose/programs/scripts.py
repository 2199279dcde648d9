"""Captures a user's training script in a process of its own, and keeps what was captured."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread

from itercast.capture.base.cache_folder import cache_folder
from itercast.capture.input.lane import InputLane
from itercast.capture.programs.machine import EmulatedGpu
from itercast.capture.programs.program import ProgramCapture, read_program
from itercast.compose.capture_model import CAPTURE, code_digest
from itercast.compose.pricing.collectives import gpus_per_domain
from itercast.compose.target import Target
from itercast.microbench.hardware.spec import COMPUTE_CAPABILITY, Gpu

MODULE = "itercast.capture.programs.script"


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
        "gpu": asdict(_emulated(target.gpu)),
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
    _run([sys.executable, "-m", MODULE, json.dumps(order), str(path)], script, limit_s)
    if not path.is_file():
        raise ValueError(f"{script.name}: no program was captured, it ended by itself")
    return read_program(path)


def _emulated(gpu: Gpu) -> EmulatedGpu:
    """What the script's ``torch.cuda`` says of the GPU; that of an H100 where it isn't known."""
    return EmulatedGpu(
        name=gpu.name,
        kind=gpu.kind,
        memory_bytes=int(gpu.hbm_bytes),
        sm_count=int(gpu.sm_count),
        compute_capability=COMPUTE_CAPABILITY.get(gpu.architecture, (9, 0)),
    )


def _unchanged(digests: dict[str, str]) -> bool:
    """Whether files still have the contents that they had."""
    return all(_digest(Path(name)) == digest for name, digest in digests.items())


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _run(command: Sequence[str], script: Path, limit_s: int) -> None:
    """Run the capture; kill all that it started when it ends, fails or takes too long."""
    process = subprocess.Popen(
        command, stdout=sys.__stderr__, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    Thread(target=_kill_workers, args=(process,), daemon=True).start()
    try:
        _, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{script.name} made too few steps within {limit_s} s") from None
    finally:
        process.kill()
        process.communicate()  # returns when its workers are gone too
    if process.returncode:
        lines = said.strip().splitlines()
        ours = [line for line in lines if line.startswith("itercast: ")]
        told = (ours or lines or [f"{script.name} ended with {process.returncode}"])[-1]
        raise ValueError(told.removeprefix("itercast: "))


def _kill_workers(process: subprocess.Popen[str]) -> None:
    """When a script has ended, kill what it started: workers keep its stderr open."""
    process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
