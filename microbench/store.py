"""Measured rows on disk: a journal that survives kill -9, whole part files, cards."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from microbench.hardware.spec import Gpu, gpu_from_dict

log = logging.getLogger(__name__)
SOURCE = "itercast"
FOLDER = re.compile(r"[\w+-][\w.+-]*")  # a family, a GPU, a source: no way out of the root


def point_key(row: Mapping[str, Any]) -> str:
    """Names one measurement of one point: everything asked for, nothing measured."""
    asked = {"family": row["family"], "gpu": row["gpu"], "threads": row["threads"]}
    asked |= {"cache": row["cache"], "repeat": row["repeat"], "point": row["point"]}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def write_atomic(path: Path, data: bytes) -> None:
    """Write, fsync, rename: readers see the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Journal:
    """Append-only file of finished points; each line is on disk before the next point starts."""

    def __init__(self, root: Path, run_id: str) -> None:
        folder = root / ".journal"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{run_id}.jsonl").open("ab")
        if self._file.tell():  # a worker killed in mid-line went before: end its torn line
            self._file.write(b"\n")

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """All rows of one point in one write."""
        self._file.write(b"".join(json.dumps(r).encode() + b"\n" for r in rows))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """No more points."""
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Rows of a journal; a torn last line (the point that was being written) is dropped."""
    rows = []
    for line in path.read_bytes().split(b"\n"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def compact(root: Path, hardware: Mapping[str, Any]) -> int:
    """Turn journals into part files and renew the cards; returns the number of rows moved.

    A part carries its journal's name, so that a compaction killed half-way is simply repeated. A
    journal whose rows make no table stays as it is: no sweep ends for it, and no row is lost.
    """
    moved = 0
    for path in sorted((root / ".journal").glob("*.jsonl")):
        rows = read_journal(path)
        try:
            _write_parts(root, rows, path.stem, hardware)
        except (ValueError, TypeError) as exc:  # pyarrow's errors are of these kinds
            log.error("journal %s stays as it is: %s", path, exc)
            continue
        path.unlink()
        moved += len(rows)
    return moved


def _write_parts(
    root: Path, rows: list[dict[str, Any]], name: str, hardware: Mapping[str, Any]
) -> None:
    """A part by family and GPU, and its card."""
    if not rows:
        return
    for (family, gpu), group in pd.DataFrame(rows).groupby(["family", "gpu"]):
        write_part(root, str(family), str(gpu), group, name)
        write_card(root / str(family) / str(gpu) / SOURCE, hardware)


def write_part(
    root: Path, family: str, gpu: str, rows: pd.DataFrame, name: str, source: str = SOURCE
) -> Path:
    """One Parquet part, visible only when whole; columns without any value are left out."""
    for folder in (family, gpu, source):
        if not FOLDER.fullmatch(folder):
            raise ValueError(f"{folder!r} names no folder of rows: letters, digits and .+-_ do")
    path = root / family / gpu / source / f"part-{name}.parquet"
    data = rows.dropna(axis=1, how="all").to_parquet(None, index=False, compression="zstd")
    write_atomic(path, data)
    return path


def write_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """card.yaml: the facts given, rows by status, and a digest of every part."""
    parts = sorted(folder.glob("part-*.parquet"))
    status = pd.concat([pd.read_parquet(p, columns=["status"]) for p in parts])["status"]
    card = {
        **facts,
        "rows": {str(k): int(v) for k, v in status.value_counts().items()},
        "sha256": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in parts},
    }
    write_atomic(folder / "card.yaml", yaml.safe_dump(card, sort_keys=False).encode())


def read_rows(roots: Sequence[Path], family: str) -> pd.DataFrame:
    """All rows of a family under the roots, parts in name order; empty where there are none."""
    parts = [p for root in roots for p in sorted(Path(root).glob(f"{family}/*/*/part-*.parquet"))]
    if not parts:
        return pd.DataFrame()
    return pd.concat([pd.read_parquet(p) for p in parts], ignore_index=True)


def read_hardware(roots: Sequence[Path]) -> dict[str, Gpu]:
    """Hardware of the machines that measured rows, as their cards state it."""
    found: dict[str, Gpu] = {}
    for root in roots:
        for path in sorted(Path(root).glob("*/*/*/card.yaml")):
            facts = (yaml.safe_load(path.read_text()) or {}).get("hardware")
            if facts:
                found[facts["name"]] = gpu_from_dict(facts, str(path))
    return found
