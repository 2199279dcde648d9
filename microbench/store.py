"""Datasets on disk: journals of measured rows, Parquet parts with cards, all safe to kill."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from itercast.capture.base.files import write_atomic
from itercast.capture.base.slow_imports import pa, pd, pq
from itercast.capture.base.yaml_text import load_yaml, made_of
from itercast.microbench.hardware.spec import Gpu

log = logging.getLogger(__name__)
Row = dict[str, Any]  # of a dataset: values by column
Facts = Mapping[str, Any]  # of a row or a card, by name
SOURCE = "itercast"
FACTS = b"card"  # key of a part's metadata: the facts of its card, as JSON
MACHINE = ("host", "gpu_uuid")  # columns that say where a row was measured
OF_PARTS = ("machines", "rows", "sha256")  # of a card; computed from the parts
ROOM_BYTES = 2**16  # more than the rows of a chunk
FOLDER = re.compile(r"[\w+-][\w.+-]*")  # of a family, GPU or source; no path out of the root


def point_key(row: Facts) -> str:
    """Hash that identifies one measurement: family, GPU, threads, cache, repeat and parameters."""
    key = {"family": row["family"], "gpu": row["gpu"], "threads": row["threads"]}
    key |= {"cache": row["cache"], "repeat": row["repeat"], "point": row["point"]}
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


class Journal:
    """Append-only file of finished rows; they are on disk before the next point starts."""

    def __init__(self, root: Path, run_id: str) -> None:
        folder = root / ".journal"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{run_id}.jsonl").open("ab")
        if self._file.tell():  # an earlier worker may have been killed in mid-line: end that line
            self._file.write(b"\n")

    def append(self, rows: Iterable[Facts]) -> None:
        """Append the rows of one point in one write, and wait until they are on disk."""
        self._file.write(b"".join(json.dumps(r).encode() + b"\n" for r in rows))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_room(root: Path) -> None:
    """OSError where no more rows can be written under a root, as on a full disk."""
    probe = root / ".journal" / f"room-{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(ROOM_BYTES))
    except OSError as exc:
        kept = f"{exc.strerror}; rows measured so far are kept, and the same command goes on"
        raise OSError(exc.errno, kept, str(root)) from exc
    finally:
        probe.unlink(missing_ok=True)


def read_journal(path: Path) -> list[Row]:
    """Rows of a journal, without lines that were cut off when a worker was killed."""
    rows = []
    for line in path.read_bytes().split(b"\n"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def compact(root: Path, facts: Facts) -> int:
    """Turn journals into part files and update the cards; returns the number of rows moved.

    A part has its journal's name, so that a compaction which was killed half-way can be repeated. A
    journal whose rows form no table is kept and logged: no row is lost, and the sweep goes on.
    """
    moved = 0
    for path in sorted((root / ".journal").glob("*.jsonl")):
        rows = read_journal(path)
        try:
            _write_parts(root, rows, path.stem, facts)
        except (ValueError, TypeError) as exc:  # pyarrow's errors are of these kinds
            log.error("journal %s was kept: its rows form no table (%s)", path, exc)
            continue
        path.unlink()
        moved += len(rows)
    return moved


def _write_parts(root: Path, rows: list[Row], name: str, facts: Facts) -> None:
    """Write one part per family and GPU, and update the cards."""
    if not rows:
        return
    for (family, gpu), group in pd.DataFrame(rows).groupby(["family", "gpu"]):
        part = write_part(root, str(family), str(gpu), group, name, facts=facts)
        write_card(part.parent, facts)


def write_part(
    root: Path,
    family: str,
    gpu: str,
    rows: pd.DataFrame,
    name: str,
    source: str = SOURCE,
    facts: Facts | None = None,
) -> Path:
    """Write one Parquet part at once; columns without any value are left out.

    ``facts`` of its card are kept in the part too, from which cards are written anew.
    """
    for folder in (family, gpu, source):
        if not FOLDER.fullmatch(folder):
            raise ValueError(f"{folder!r}: folder names have letters, digits and .+-_ only")
    path = root / family / gpu / source / f"part-{name}.parquet"
    table = pa.Table.from_pandas(rows.dropna(axis=1, how="all"), preserve_index=False)
    stated = {FACTS: json.dumps(dict(facts)).encode()} if facts else {}
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **stated})
    data = io.BytesIO()
    pq.write_table(table, data, compression="zstd")
    write_atomic(path, data.getvalue())
    return path


def write_card(folder: Path, facts: Facts | None = None) -> None:
    """Write card.yaml: facts, rows by status, SHA-256 of every part, machines that measured them.

    Without ``facts``, the facts of the existing card are kept, else those of the newest part.
    """
    parts = sorted(folder.glob("part-*.parquet"))
    facts_of_parts = [part_facts(p) for p in parts]
    card = folder / "card.yaml"
    if facts is None and card.is_file():
        stated = load_yaml(card.read_text()) or {}
        facts = {k: v for k, v in stated.items() if k not in OF_PARTS}
    if facts is None:
        facts = max(facts_of_parts, key=lambda part: str(part.get("when", "")), default={})
    wanted = ("status", *MACHINE)
    present = [[name for name in wanted if name in pq.read_schema(p).names] for p in parts]
    columns = [pd.read_parquet(p, columns=c) for p, c in zip(parts, present, strict=True)]
    card_facts = {
        **facts,
        "machines": _machines(facts_of_parts, columns),
        "rows": {str(k): int(v) for k, v in pd.concat(columns)["status"].value_counts().items()},
        "sha256": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in parts},
    }
    card_facts = {k: v for k, v in card_facts.items() if k != "machines" or v}
    write_atomic(card, yaml.safe_dump(card_facts, sort_keys=False).encode())


def part_facts(path: Path) -> Row:
    """The facts of its card that a part keeps; none in parts of other origin."""
    return dict(json.loads((pq.read_schema(path).metadata or {}).get(FACTS, b"{}")))


def _machines(stated: Sequence[Facts], columns: Sequence[pd.DataFrame]) -> list[Row]:
    """Each host and GPU with rows in these parts, with its software and number of rows.

    ``stated``: facts of each part; ``columns``: the MACHINE columns of each part's rows.
    """
    machines: dict[str, Row] = {}
    for facts, rows in zip(stated, columns, strict=True):
        names = [name for name in MACHINE if name in rows]
        for values, rows_there in rows[names].fillna("").groupby(names) if names else ():
            place = {n: str(value) for n, value in zip(names, values, strict=True) if value}
            software = copy.deepcopy({n: facts[n] for n in ("versions", "when") if n in facts})
            if "gpu_uuid" in place and "versions" in software:  # there of the host's first GPU
                software["versions"] = {**software["versions"], "gpu_uuid": place["gpu_uuid"]}
            machine = {**place, **software}
            machine = machines.setdefault(json.dumps(machine, default=str), {**machine, "rows": 0})
            machine["rows"] += len(rows_there)
    return [machines[key] for key in sorted(machines)]


def read_rows(roots: Sequence[Path], family: str) -> pd.DataFrame:
    """All rows of a family under the roots, parts in order of names; empty where there are none."""
    tables = [rows for _, rows in read_parts(roots, family)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def read_parts(roots: Sequence[Path], family: str) -> Iterator[tuple[Path, pd.DataFrame]]:
    """Each part of a family under the roots, in order of names, with its rows."""
    for path in _parts(roots, family):
        with _readable(path):
            rows = pd.read_parquet(path)
        yield path, rows


def _parts(roots: Sequence[Path], family: str) -> list[Path]:
    """Paths of a family's parts; ValueError for a Parquet file in another place or with no name."""
    places = ("*/*/*", "*/*", "*")
    paths = [
        path
        for root in roots
        for place in places
        for path in sorted(Path(root).glob(f"{family}/{place}.parquet"))
    ]
    for path in paths:
        if not (path.name.startswith("part-") and path.parents[2].name == family):
            named = f"{family}/GPU/SOURCE/part-NAME.parquet"
            raise ValueError(f"{str(path)!r} would be ignored: parts are called {named}")
    return paths


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Name the part in the error where it cannot be read."""
    try:
        yield
    except (pa.ArrowException, OSError) as exc:
        reason = " ".join(str(exc).split())[:200]
        raise ValueError(f"part {str(path)!r} is damaged or no Parquet: {reason}") from exc


def read_hardware(roots: Sequence[Path]) -> dict[str, Gpu]:
    """Hardware of the GPUs with rows under the roots, by name, as their cards state it."""
    gpus: dict[str, Gpu] = {}
    for root in roots:
        for path in sorted(Path(root).glob("*/*/*/card.yaml")):
            facts = (load_yaml(path.read_text()) or {}).get("hardware")
            if facts:
                gpus[facts["name"]] = made_of(Gpu, facts, str(path))
    return gpus


def read_versions(roots: Sequence[Path]) -> dict[str, dict[str, str]]:
    """Versions of software by name, of each GPU that itercast measured, as the cards state them.

    Where cards differ the last one counts.
    """
    versions_by_gpu: dict[str, dict[str, str]] = {}
    for root in roots:
        for path in sorted(Path(root).glob(f"*/*/{SOURCE}/card.yaml")):
            versions = (load_yaml(path.read_text()) or {}).get("versions") or {}
            of_gpu = versions_by_gpu.setdefault(path.parts[-3], {})
            of_gpu.update({str(name): str(version) for name, version in versions.items()})
    return versions_by_gpu
