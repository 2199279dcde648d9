"""A sweep within a budget: workers measure points, the parent restarts and compacts."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from microbench import store
from microbench.processes.ranks import start_ranks
from microbench.processes.watch import last_words, never, watch
from microbench.sweep.captured_points import check_points, points_file, points_path
from microbench.sweep.cards import card_facts
from microbench.sweep.contention import measure_contention
from microbench.sweep.gpu_chunk_worker import Pending
from microbench.sweep.orders import Phase, WorkerOrder, known_families, phases, spent_s

log = logging.getLogger(__name__)
Progress = Callable[[int, float], None]
MAX_RESTARTS = 20
SILENT_STARTS = 3  # workers in a row that end before their first chunk: the next would, too
FRUITLESS = 6  # workers in a row without a row; more than it takes to find a point that kills
STALLED_S = 40.0  # twice what a chunk should take
GROUP_STALLED_S = 120.0  # of several ranks, which take longer to start
LATE_S = 30.0  # a worker may outlive its budget by: a chunk and a half
START_S = 60.0  # before a budget begins, where starting is not charged
LEAST_PHASE_S = 12.0  # a worker takes most of that to start
REST = 0.05  # of a budget: not worth starting a worker for


def collect(
    root: Path,
    device: str,
    names: Sequence[str] | None,
    budget_s: float,
    seed: int = 0,
    progress: Progress | None = None,
    torchrun: str = "",
    wanted: Path | None = None,
) -> int:
    """Sweep the families until the budget of this root is spent; returns new rows.

    ``wanted``: a file of points (``itercast points``); then these alone, in their order.

    The budget is the root's, not the run's: a resumed or repeated sweep spends what is left.
    ``torchrun``: arguments such as ``--nnodes=2 --rdzv-endpoint=host:29500``; the same sweep is
    then started on every node, and rows and budget are those of the node with rank 0.
    """
    swept = named_families(names, wanted)
    facts = card_facts(root, device)
    alone = device != "cpu" or "collective" not in swept or (os.cpu_count() or 1) == 1
    if not alone and not facts["hardware"]["contention"]:
        facts["hardware"]["contention"] = round(measure_contention(), 2)
    moved = store.compact(root, facts)
    points = wanted or captured_points_file(root, device, seed)
    for phase in phases(device, swept, bool(torchrun)):
        whole_s = budget_s * phase.share
        left_s = whole_s - spent_s(root, facts["hardware"]["name"], phase)
        if left_s < max(1.0, REST * whole_s) and not torchrun:  # other nodes wait for this one
            log.info("budget spent: %s", " ".join(phase.families))
            continue
        order = _order(root, device, facts, phase, points, seed)
        order = replace(order, budget_s=max(left_s, 1.0), torchrun=torchrun, only=bool(wanted))
        run_worker(order, progress)
        moved += store.compact(root, facts)
    return moved


def collect_for(
    root: Path,
    device: str,
    names: Sequence[str] | None,
    seconds: float,
    seed: int = 0,
    progress: Progress | None = None,
    wanted: Path | None = None,
    late_s: float = LATE_S,
) -> int:
    """Sweep for so many seconds of the clock, starts of workers included; returns new rows.

    Whatever earlier runs spent does not count. A worker still there ``late_s`` after its time is
    ended; what it had not written is lost, and free to be measured again.
    """
    end_s = time.monotonic() + seconds
    facts = card_facts(root, device)
    moved = store.compact(root, facts)
    points = wanted or captured_points_file(root, device, seed)
    left = phases(device, named_families(names, wanted))
    while left:
        begin_s, share = time.monotonic(), left[0].share / sum(p.share for p in left)
        left_s, phase = end_s - begin_s, left.pop(0)
        budget_s = min(left_s, max(share * left_s, LEAST_PHASE_S))
        if budget_s < 1:
            log.info("no time left: %s", " ".join(phase.families))
            continue
        order = _order(root, device, facts, phase, points, seed)
        order = replace(order, budget_s=budget_s, begin_s=begin_s, only=bool(wanted))
        run_worker(order, progress, late_s)
        moved += store.compact(root, facts)
    return moved


def _order(
    root: Path, device: str, facts: dict[str, Any], phase: Phase, points: Path, seed: int
) -> WorkerOrder:
    """What a phase's worker is told, but for its budget."""
    label = f"t{phase.threads}-r{phase.ranks}"
    now = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06d}"
    return WorkerOrder(
        root=str(root),
        run_id=f"{now}-{os.getpid()}-{label}",
        device=device,
        gpu=facts["hardware"]["name"],
        families=phase.families,
        threads=phase.threads,
        budget_s=0.0,
        seed=seed,
        ranks=phase.ranks,
        hardware=facts["hardware"],
        points=str(points),
    )


def named_families(names: Sequence[str] | None, wanted: Path | None) -> tuple[str, ...]:
    """The families to sweep: of those named, or all, the ones the file of points speaks of."""
    swept = known_families(names)
    if wanted is None:
        return swept
    check_points(wanted)
    found = json.loads(wanted.read_text())
    return tuple(n for n in swept if found.get(n))


def captured_points_file(root: Path, device: str, seed: int) -> Path:
    """Where captured points are; on a GPU box they are captured while the GPU is busy already."""
    if device == "cpu":
        return points_file(root, device, seed)
    threading.Thread(target=points_file, args=(root, device, seed), daemon=True).start()
    return points_path(root, device, seed)


def run_worker(
    order: WorkerOrder, progress: Progress | None = None, late_s: float = LATE_S
) -> None:
    """Run the process or the group of ranks; one that dies is started again while there is time.

    On a GPU one that shows no sign of life for a while is killed, as kernels can hang, and so is
    one that outlives its budget by ``late_s``; not so where other nodes take part.
    """
    begin_s, silent, fruitless = order.begin_s or time.monotonic(), 0, 0
    guarded = order.device == "cuda" and not order.torchrun
    late = begin_s + order.budget_s + late_s + (0.0 if order.begin_s else START_S)
    left_s, until_s = order.budget_s, late if guarded else math.inf

    def look() -> tuple[int, int]:
        rows, elapsed_s = count_lines(order), time.monotonic() - begin_s
        if progress:
            progress(rows, min(1.0, elapsed_s / order.budget_s))
        return rows, _pending_since(order)

    for _ in range(MAX_RESTARTS + 1):
        before = look()
        code = _run_once(order if order.begin_s else replace(order, budget_s=left_s), look, until_s)
        after, left_s = look(), order.budget_s - (time.monotonic() - begin_s)
        silent = silent + 1 if after == before else 0
        fruitless = fruitless + 1 if after[0] == before[0] else 0
        if code == 0 or left_s < 2:
            return
        if silent == SILENT_STARTS or fruitless == FRUITLESS:
            log.error("given up: workers of %s bring no rows", order.families[0])
            return


def _run_once(order: WorkerOrder, look: Callable[[], object], until_s: float) -> int:
    """One worker, or group, until it ends or must; its exit code."""
    process = start_worker(order)
    most_s = GROUP_STALLED_S if order.together else STALLED_S
    stalled_s = never if math.isinf(until_s) else (lambda: most_s)
    ended = "stopped"
    try:
        ended = watch(process, look, stalled_s, until_s)
    finally:
        if ended in ("stopped", "late"):  # the points it was at are not at fault
            _pending_path(order).unlink(missing_ok=True)
    if process.returncode != 0:
        _tell(order, ended, process.returncode)
    return int(process.returncode)


def _tell(order: WorkerOrder, ended: str, code: int) -> None:
    """What became of a worker that did not end well, in one line."""
    words = last_words(log_path(order)) if order.device == "cuda" else ""
    log.warning("worker of %s: %s, code %d: %s", order.families[0], ended, code, words)


def start_worker(order: WorkerOrder) -> subprocess.Popen[bytes]:
    """A worker process, or a group of them; it reads its order from its argument."""
    printed = log_path(order) if order.device == "cuda" else None
    return start_ranks(
        "microbench.sweep.worker", asdict(order), order.ranks, order.torchrun, log=printed
    )


def log_path(order: WorkerOrder) -> Path:
    """What the order's workers print on a GPU box."""
    return Path(order.root) / "logs" / f"{order.run_id}.log"


def count_lines(order: WorkerOrder) -> int:
    """Rows journalled so far."""
    journal = Path(order.root) / ".journal" / f"{order.run_id}.jsonl"
    return journal.read_bytes().count(b"\n") if journal.is_file() else 0


def _pending_path(order: WorkerOrder) -> Path:
    return Pending(Path(order.root), order.gpu).path


def _pending_since(order: WorkerOrder) -> int:
    """When a worker on a GPU last began or finished a chunk."""
    try:
        return _pending_path(order).stat().st_mtime_ns
    except FileNotFoundError:
        return 0
