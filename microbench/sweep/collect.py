"""Runs a sweep within a budget: starts workers, restarts those that die, compacts journals."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from itercast.microbench import store
from itercast.microbench.processes.lanes import run_lanes
from itercast.microbench.processes.ranks import start_ranks, threads_of
from itercast.microbench.processes.watch import log_tail, never, watch
from itercast.microbench.store import Facts, Row
from itercast.microbench.sweep.captured_points import (
    capture_seconds,
    check_points,
    points_file,
    points_path,
)
from itercast.microbench.sweep.cards import card_facts
from itercast.microbench.sweep.contention import measure_contention
from itercast.microbench.sweep.orders import Phase, WorkerOrder, known_families, phases, spent_s
from itercast.microbench.sweep.rows import new_run_id
from itercast.microbench.sweep.under_way import under_way_path

log = logging.getLogger(__name__)
Progress = Callable[[int, float], None]
MAX_RESTARTS = 20
MAX_SILENT_STARTS = 3  # in a row, of workers that end before their first chunk
MAX_STARTS_WITHOUT_ROWS = 6  # in a row; more than it takes to isolate a point that ends workers
STALLED_S = 40.0  # without progress; twice the time of a chunk
GROUP_STALLED_S = 120.0  # the same of several ranks, which take longer to start
GRACE_S = 30.0  # of a worker after its budget, before it is killed: a chunk and a half
USUAL_START_S = 3.0  # of a phase's worker, until the first one was started
START_S = 60.0  # for starting a worker, where the budget begins afterwards
MIN_LEFT_FRAC = 0.05  # of a budget; for less no worker is started


def collect(
    root: Path,
    device: str,
    names: Sequence[str] | None,
    budget_s: float,
    seed: int = 0,
    progress: Progress | None = None,
    torchrun: str = "",
    wanted: Path | None = None,
    devices: int = 1,
    among: tuple[int, int] = (0, 1),
) -> int:
    """Sweep families until a root's budget is spent; returns the number of new rows.

    The budget belongs to the root: a resumed or repeated sweep spends what is left of it. Starts of
    workers and captures of models count, but each phase measures for a second at least.
    ChildProcessError where workers failed and none brought a row.
    ``wanted``: a file of points (``write_points``); only these are measured, in its order.
    ``torchrun``: arguments such as ``--nnodes=2 --rdzv-endpoint=host:29500``; the same sweep is
    then started on every node, and the node with rank 0 keeps rows and budget.
    ``devices``: GPUs of this node that share the points, one worker each.
    ``among``: number of this sweep among so many that share all points.
    """
    begin_s, swept = time.monotonic(), named_families(names, wanted)
    facts = card_facts(root, device)
    overlaps = device == "cpu" and "collective" in swept and threads_of(1) > 1
    new_rows = store.compact(root, facts)
    points = wanted or captured_points_file(root, device, seed)
    planned = phases(device, swept, bool(torchrun), devices)
    left_s = dict(zip(planned, unspent(root, facts, planned, budget_s, points), strict=True))
    if not torchrun:  # else other nodes would wait
        left_s = {
            p: s for p, s in left_s.items() if s >= max(1.0, MIN_LEFT_FRAC * budget_s * p.share)
        }
    if overlaps and left_s:  # once more in each sweep of a root, as a shared machine changes
        before, now = facts["hardware"]["contention"], measure_contention()
        facts["hardware"]["contention"] = round(((before or now) * now) ** 0.5, 2)
    whole_s, start_s = sum(left_s.values()), USUAL_START_S
    if not left_s:
        message = "rows of %s under %s took its budget of %g s already, a larger one goes on"
        log.warning(message, facts["hardware"]["name"], root, budget_s)
    end_s, failed = begin_s + whole_s, False
    while left_s:
        wall_s = end_s - time.monotonic()
        measure_s = max(wall_s / 2, wall_s - start_s * len(left_s))
        share, phase = measure_s / sum(left_s.values()), next(iter(left_s))
        order = order_of(root, device, facts, phase, points, seed)
        phase_s = max(1.0, min(1.0, share) * left_s.pop(phase))
        order = replace(order, budget_s=phase_s, torchrun=torchrun, only=bool(wanted), among=among)
        started_s = time.monotonic()
        failed |= not run_workers(order, of_all(progress, new_rows, begin_s, whole_s))
        new_rows += store.compact(root, facts)
        start_s = max(0.0, time.monotonic() - started_s - phase_s)
    if failed and not new_rows:
        raise ChildProcessError(
            f"no new row under {str(root)!r}: its workers failed, as said above"
        )
    return new_rows


def of_all(progress: Progress | None, rows_before: int, begin_s: float, whole_s: float) -> Progress:
    """Wraps ``progress``, so that one phase reports its share of the whole sweep."""

    def show(rows: int, _: float) -> None:
        if progress:
            progress(rows_before + rows, min(1.0, (time.monotonic() - begin_s) / whole_s))

    return show


def unspent(
    root: Path, facts: Facts, planned: Sequence[Phase], budget_s: float, points: Path
) -> list[float]:
    """Seconds of a root's budget that are left for each phase.

    The first phase also pays for captures of models (``points``: their file).
    """
    gpu = facts["hardware"]["name"]
    spent = [spent_s(root, gpu, phase) for phase in planned]
    spent[:1] = [s + capture_seconds(points) for s in spent[:1]]
    return [budget_s * phase.share - s for phase, s in zip(planned, spent, strict=True)]


def measure_points(
    root: Path,
    device: str,
    wanted: Path,
    budget_s: float,
    seed: int = 0,
    progress: Progress | None = None,
) -> int:
    """Measure points of a file in its order, on all cores or on a GPU; returns the number of rows.

    Families of several ranks are left out. Workers start before the budget begins.
    """
    facts, begin_s, new_rows = card_facts(root, device), time.monotonic(), 0
    single_rank = [p for p in phases(device, named_families(None, wanted)) if p.ranks == 1]
    whole = sum(p.share for p in single_rank)
    for phase in single_rank:
        order = order_of(root, device, facts, phase, wanted, seed)
        order = replace(order, budget_s=budget_s * phase.share / whole, only=True)
        run_worker(order, of_all(progress, new_rows, begin_s, budget_s))
        new_rows += store.compact(root, facts)
    return new_rows


def order_of(
    root: Path, device: str, facts: Row, phase: Phase, points: Path, seed: int
) -> WorkerOrder:
    """The order to a phase's worker, without its budget."""
    return WorkerOrder(
        root=str(root),
        run_id=new_run_id(f"t{phase.threads}-r{phase.ranks}"),
        device=device,
        gpu=facts["hardware"]["name"],
        families=phase.families,
        threads=phase.threads,
        budget_s=0.0,
        seed=seed,
        ranks=phase.ranks,
        hardware=facts["hardware"],
        points=str(points),
        lanes=phase.lanes,
    )


def named_families(names: Sequence[str] | None, wanted: Path | None) -> tuple[str, ...]:
    """The families to sweep: those named, or all, as far as a file of points has them."""
    swept = known_families(names)
    if wanted is None:
        return swept
    check_points(wanted)
    points = json.loads(wanted.read_text())
    return tuple(n for n in swept if points.get(n))


def captured_points_file(root: Path, device: str, seed: int) -> Path:
    """Path of the captured points: a GPU's are captured by a thread while it is busy.

    On a CPU that would disturb the sweep, whose worker captures models between its points.
    """
    if device != "cpu":
        threading.Thread(target=points_file, args=(root, device, seed), daemon=True).start()
    return points_path(root, device, seed)


def run_workers(
    order: WorkerOrder, progress: Progress | None = None, grace_s: float = GRACE_S
) -> bool:
    """Run the order's workers, one per GPU where there are several, which share its points.

    Returns whether each ended well or brought rows.
    """

    def run(lane: int, tell: Callable[[tuple[int, float]], None]) -> bool:
        run_id = f"{order.run_id}-g{lane}" if order.lanes > 1 else order.run_id
        lane_order = replace(order, lane=lane, run_id=run_id)
        return run_worker(lane_order, lambda rows, frac: tell((rows, frac)), grace_s)

    def show(progress_by_lane: list[tuple[int, float]]) -> None:
        if progress and progress_by_lane:
            progress(
                sum(rows for rows, _ in progress_by_lane), max(frac for _, frac in progress_by_lane)
            )

    return all(run_lanes(order.lanes, run, show))


def run_worker(
    order: WorkerOrder, progress: Progress | None = None, grace_s: float = GRACE_S
) -> bool:
    """Run a worker, or a group of ranks, and restart it when it dies, until its budget is spent.

    Returns whether a worker ended well or brought rows. On a GPU a worker is killed when it makes
    no progress, as kernels can hang, and ``grace_s`` after its budget; not where other nodes take
    part.
    """
    begin_s, silent_starts, without_rows = order.begin_s or time.monotonic(), 0, 0
    guarded = order.device == "cuda" and not order.torchrun
    late_s = begin_s + order.budget_s + grace_s + (0.0 if order.begin_s else START_S)
    left_s, until_s = order.budget_s, late_s if guarded else math.inf

    def state() -> tuple[int, int]:
        """Rows so far, and when a point was last begun: a worker that changes neither hangs."""
        rows, elapsed_s = order.rows(), time.monotonic() - begin_s
        if progress:
            progress(rows, min(1.0, elapsed_s / order.budget_s))
        return rows, _last_begun_ns(order)

    for _ in range(MAX_RESTARTS + 1):
        before = state()
        code = _run_once(
            order if order.begin_s else replace(order, budget_s=left_s), state, until_s
        )
        after, left_s = state(), order.budget_s - (time.monotonic() - begin_s)
        silent_starts = silent_starts + 1 if after == before else 0
        without_rows = without_rows + 1 if after[0] == before[0] else 0
        if code == 0:
            return True
        if silent_starts == MAX_SILENT_STARTS or without_rows == MAX_STARTS_WITHOUT_ROWS:
            log.error("the sweep of %s ends: its workers return no rows", order.families[0])
            break
        if left_s < 2:
            break
    return order.rows() > 0


def _run_once(order: WorkerOrder, state: Callable[[], object], until_s: float) -> int:
    """Run a worker, or a group, until it ends or is killed; returns its exit code."""
    process = start_worker(order)
    most_s = GROUP_STALLED_S if order.together else STALLED_S
    stalled_s = never if math.isinf(until_s) else (lambda: most_s)
    ended = "stopped"
    try:
        ended = watch(process, state, stalled_s, until_s)
    finally:
        if ended in ("stopped", "late"):  # not because of the points it was at
            under_way_path(order).unlink(missing_ok=True)
    if process.returncode != 0:
        store.check_room(Path(order.root))
        output = log_tail(order.printed) if order.device == "cuda" else ""
        what = (order.families[0], ended, process.returncode, output)
        log.warning("worker of %s %s, exit code %d: %s", *what)
    return int(process.returncode)


def start_worker(order: WorkerOrder) -> subprocess.Popen[bytes]:
    """Start a worker process, or a group of ranks, with the order as its argument."""
    printed = order.printed if order.device == "cuda" else None
    return start_ranks(
        "itercast.microbench.sweep.worker", asdict(order), order.ranks, order.torchrun, log=printed
    )


def _last_begun_ns(order: WorkerOrder) -> int:
    """Time at which a worker last began a point or a chunk; 0 before the first."""
    try:
        return under_way_path(order).stat().st_mtime_ns
    except FileNotFoundError:
        return 0
