"""Measures one chunk on its machine and sends its parts: a process that a Ray task starts.

    python -m itercast.extras.fleet.chunk ORDER.json

The sweep is that of ``itercast collect``, in a folder of the chunk's own. Its journal survives the
death of this process, so that another one on this machine goes on with it. At the end the chunk is
one part per family, named by the hash of its points: whoever measures it again adds nothing.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from itercast.capture.base.files import write_atomic
from itercast.capture.base.yaml_text import made_of
from itercast.extras.fleet.chunks import ITERATIONS, Chunk, Plain
from itercast.extras.roots.urls import PROBE, Root
from itercast.microbench import store
from itercast.microbench.iterations.collect import collect_iterations
from itercast.microbench.iterations.measure import Iteration
from itercast.microbench.store import Row
from itercast.microbench.sweep.captured_points import points_path
from itercast.microbench.sweep.cards import card_facts, cuda_gpu
from itercast.microbench.sweep.collect import collect
from itercast.microbench.sweep.rows import machine
from itercast.microbench.timing.nvml import Nvml

CLOSE_S = 6.0  # before the deadline, for the end of the sweep and the upload
WAIT_S = 0.2  # between looks for free cores
MIN_S = 2.0  # of measuring; with less nothing is started
FREE_BYTES = 64 * 2**20  # on the disk of the journal
THROTTLED_FRAC = 0.5  # of a chunk's rows; with more it is measured elsewhere
DONE, REFUSED, THROTTLED, LATE = "done", "refused", "throttled", "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOrder:
    """A chunk to measure on a machine of a kind, for a dataset at ``root`` (folder or URL).

    ``work``: folder of journals on the machine. ``cores``: to measure on. ``until``: deadline in
    seconds since 1970. ``torchrun``: its arguments, of a chunk over several nodes. ``last``: the
    chunk was on another machine already, so that rows of a throttled GPU are kept.
    """

    chunk: Chunk
    root: str
    work: str
    gpu: str
    cores: int
    until: float
    torchrun: str = ""
    last: bool = False

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return "cpu" if self.gpu == "cpu" else "cuda"


def measure(order: ChunkOrder) -> Plain:
    """Measure a chunk and send its parts; returns how it ended, on which machine, with what rows.

    Nothing is measured on a GPU of another name than the plan says, or that others use.
    """
    chunk = order.chunk
    if order.device == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, own_cores(order.cores, order.until))
    on_machine = machine(order.device)
    facts: Plain = {"chunk": chunk.name, **on_machine, "began": round(time.time(), 1)}
    if reason := _why_refused(order):
        return {**facts, "state": REFUSED, "reason": reason}
    folder = Path(order.work) / chunk.name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        root, name = Root(order.root), f".fleet/{chunk.name}.json"
        known = root.names(".fleet")
        if name in known:  # another attempt ended meanwhile
            return dict(json.loads(root.get(name)))
        if PROBE not in known:
            reason = f"folder {order.root} is not that of the command; give a shared one, or a URL"
            return {**facts, "state": REFUSED, "reason": reason}
        left_s = min(chunk.seconds, order.until - time.time() - CLOSE_S)
        if left_s >= MIN_S:
            _sweep(order, folder, root, left_s)
        elif not list(folder.glob("*/*/*/part-*.parquet")):
            return {**facts, "state": LATE, "reason": "no time was left"}
        rows = _rows(order, folder)
        throttled = float((rows["status"] == "throttled").mean()) if len(rows) else 0.0
        if throttled > THROTTLED_FRAC and not order.last:
            return {**facts, "state": THROTTLED, "reason": f"{100 * throttled:.0f} % of its rows"}
        result = {**facts, "state": DONE, **_summary(rows), **_software(folder)}
        result["families"] = _send(order, folder, root, rows)
        result["ended"] = round(time.time(), 1)
        if len(rows) or not order.torchrun:  # over nodes one has all rows
            root.put(name, json.dumps(result).encode())
        for path in folder.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return result


def _why_refused(order: ChunkOrder) -> str:
    """Why this machine refuses the chunk, in a few words; empty if it measures it."""
    Path(order.work).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(order.work).free
    if free < FREE_BYTES:
        return f"disk of {order.work} is full: {free / 2**20:.0f} MiB are free"
    if order.device == "cpu":
        return ""
    if (name := cuda_gpu().name) != order.gpu:
        return f"GPU is {name}, the plan says {order.gpu}"
    if others := Nvml(machine("cuda")["gpu_uuid"]).others():
        return f"GPU is shared: {others} other processes compute on it"
    return ""


def own_cores(count: int, until: float = math.inf) -> list[int]:
    """Cores that no other chunk on this machine measures on, until this process ends.

    Waits for them until a time in seconds since 1970; after that takes the first ones.
    """
    cores = sorted(os.sched_getaffinity(0))
    while time.time() < until:
        locks = {core: lock for core in cores if (lock := _lock_of(core)) is not None}
        kept = list(locks)[:count]
        if len(kept) < min(count, len(cores)):
            kept = []
        for core in locks.keys() - kept:
            os.close(locks[core])
        if kept:
            return kept
        time.sleep(WAIT_S)
    return cores[:count]


def _lock_of(core: int) -> int | None:
    """An open file whose lock reserves the core; None if another process has it."""
    name = Path(tempfile.gettempdir()) / f"itercast-{os.getuid()}-core-{core}"
    file = os.open(name, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with this process; an earlier attempt may still be ending."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(order: ChunkOrder, folder: Path, root: Root, left_s: float) -> None:
    """Measure what neither the journal nor parts at the root have."""
    chunk, part = order.chunk, f"/part-{order.chunk.name}.parquet"
    sent = {n.split("/")[0] for n in root.names() if n.endswith(part)}
    names = [n for n in chunk.families if n not in sent]
    if not names:
        return
    if chunk.kind == ITERATIONS:
        iterations = [Iteration(**plain) for plain in chunk.points["iteration"]]
        end_s = time.monotonic() + left_s
        for repeat in (0, 1):
            rest_s = end_s - time.monotonic()
            collect_iterations(folder, order.device, iterations, repeat, budget_s=rest_s)
        return
    captured = points_path(folder, order.device, chunk.seed)
    write_atomic(captured, json.dumps(chunk.points).encode())
    collect(
        folder,
        order.device,
        names,
        left_s,
        chunk.seed,
        torchrun=order.torchrun,
        among=chunk.share,
    )


def _rows(order: ChunkOrder, folder: Path) -> pd.DataFrame:
    """All rows of the chunk, each once; for a throttled point, the later row."""
    store.compact(folder, card_facts(folder, order.device))
    tables = [store.read_rows([folder], name) for name in order.chunk.families]
    tables = [t for t in tables if len(t)]
    if not tables:
        return pd.DataFrame({"status": [], "family": [], "gpu": []})
    return pd.concat(tables, ignore_index=True).drop_duplicates("key", keep="last")


def _send(order: ChunkOrder, folder: Path, root: Root, rows: pd.DataFrame) -> dict[str, int]:
    """Write a part for each family, and send those that the root lacks; returns rows by family.

    Parts are written to the folder ``sent`` of this chunk on this machine.
    """
    counts: dict[str, int] = {}
    sent = {n for n in root.names() if n.endswith(f"/part-{order.chunk.name}.parquet")}
    parts = sorted(folder.glob("*/*/*/part-*.parquet"))
    facts = store.part_facts(parts[-1]) if parts else {}
    for (family, gpu), part_rows in rows.groupby(["family", "gpu"]):
        part = store.write_part(
            folder / "sent", str(family), str(gpu), part_rows, order.chunk.name, facts=facts
        )
        name = part.relative_to(folder / "sent").as_posix()
        if name not in sent:
            root.put(name, part.read_bytes())
        counts[str(family)] = len(part_rows)
    return counts


def _summary(rows: pd.DataFrame) -> Plain:
    """Rows by status, seconds of measuring, and medians of clocks, for the run in MLflow."""
    summary: Plain = {"rows": len(rows)}
    summary["statuses"] = {str(k): int(v) for k, v in rows["status"].value_counts().items()}
    if "cost_s" in rows:
        summary["measured_s"] = round(float(rows["cost_s"].sum()), 1)
    for name in ("sm_clock_hz", "power_w", "temperature_c", "drift_us", "anchor_us"):
        if name in rows and rows[name].notna().any():
            summary[name] = float(rows[name].median())
    return summary


def _software(folder: Path) -> Plain:
    """Versions and name of the device, as the cards state them."""
    parts = sorted(folder.glob("*/*/*/part-*.parquet"))
    facts: Row = store.part_facts(parts[-1]) if parts else {}
    return {
        "versions": facts.get("versions", {}),
        "gpu": facts.get("hardware", {}).get("name", ""),
    }


def main(path: Path) -> None:
    """Measure the chunk of an order's file; the result is written beside it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    order = made_of(ChunkOrder, json.loads(path.read_text()), "order")
    try:
        result = measure(order)
    except (OSError, ValueError, RuntimeError) as exc:
        message = " ".join(str(exc).split())[:300]
        result = {
            "chunk": order.chunk.name,
            "state": "failed",
            "reason": f"{type(exc).__name__}: {message}",
        }
    write_atomic(path.with_suffix(".result"), json.dumps(result).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
