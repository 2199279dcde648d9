"""Captured programs as files: gzip JSON, which is read without torch and never executed."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import asdict, fields
from pathlib import Path

from itercast.microbench.capture.cache import pack, unpack
from itercast.microbench.input.lane import InputLane
from itercast.microbench.opcall import StepCapture
from itercast.microbench.programs.program import ProgramCapture
from itercast.microbench.store import write_atomic
from itercast.microbench.yaml_text import made_of, typed


def write_program(program: ProgramCapture, path: Path, lane: InputLane | None = None) -> None:
    """Write a captured program, with the input lane of its DataLoader."""
    plain = {f.name: pack(getattr(program, f.name)) for f in fields(program)}
    plain["input"] = asdict(lane) if lane else None
    write_atomic(path, gzip.compress(json.dumps(plain).encode(), 3))


def read_program(path: Path) -> tuple[ProgramCapture, InputLane | None]:
    """A captured program and its input lane; ValueError for any other file."""
    try:
        plain = json.loads(gzip.decompress(path.read_bytes()))
        lane, ranks = plain.pop("input"), plain.pop("ranks").items()
        by_rank = {int(r): typed(StepCapture, unpack(s), f"rank {r}") for r, s in ranks}
        peaks = {int(r): n for r, n in plain.pop("peak_bytes").items()}
        notes = tuple(map(str, plain.pop("notes")))
        program = ProgramCapture(**plain, ranks=by_rank, peak_bytes=peaks, notes=notes)
        return program, made_of(InputLane, lane, "input") if lane else None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"{path}: not a captured program: {exc}") from exc
