"""Captured programs as files: gzip JSON, which is read without torch and never executed."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from dataclasses import asdict
from pathlib import Path

from itercast.microbench.capture.cache import dumps, loads
from itercast.microbench.input.lane import InputLane, lane_from
from itercast.microbench.programs.program import ProgramCapture
from itercast.microbench.store import write_atomic


def write_program(program: ProgramCapture, path: Path, lane: InputLane | None = None) -> None:
    """Write a captured program, with the input lane of its DataLoader."""
    plain = {
        "world_size": program.world_size,
        "ranks": {r: base64.b64encode(dumps(s)).decode() for r, s in program.ranks.items()},
        "peak_bytes": dict(program.peak_bytes),
        "samples": program.samples,
        "tokens": program.tokens,
        "input": asdict(lane) if lane else None,
    }
    write_atomic(path, gzip.compress(json.dumps(plain).encode(), 3))


def read_program(path: Path) -> tuple[ProgramCapture, InputLane | None]:
    """A captured program and its input lane; ValueError for any other file."""
    try:
        plain = json.loads(gzip.decompress(path.read_bytes()))
        program = ProgramCapture(
            world_size=int(plain["world_size"]),
            ranks={int(r): loads(base64.b64decode(s)) for r, s in plain["ranks"].items()},
            peak_bytes={int(r): int(n) for r, n in plain["peak_bytes"].items()},
            samples=int(plain["samples"]),
            tokens=int(plain["tokens"]),
        )
        return program, lane_from(plain["input"]) if plain["input"] else None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"{path}: not a captured program: {exc}") from exc
