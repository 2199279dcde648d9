"""Measures ops and training iterations on a GPU machine within a budget; writes one archive.

    python3 -m itercast.extras.campaign --part smoke,ops --budget 580s
    python3 -m itercast.extras.campaign --part iterations,second --budget 540s
    python3 -m itercast.extras.campaign --plan unseen --budget 440s

Each run continues from the rows under --out, or from an archive (--from). Capture models and choose
points before, without a GPU, with --prepare. However a run ends, the archive has all rows measured
so far. Needs neither git nor make.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from itercast.capture.base.durations import seconds
from itercast.extras.campaign import smoke
from itercast.extras.campaign.archive import pack, unpack
from itercast.extras.campaign.prepare import PREPARED_POINTS, prepare, use_prepared
from itercast.extras.campaign.run import Run
from itercast.extras.campaign.stages import PLANS, Stage, chosen_stages
from itercast.extras.campaign.summary import summary
from itercast.extras.roots.urls import fetched_file
from itercast.microbench import store
from itercast.microbench.processes.lanes import gpu_count
from itercast.microbench.sweep.captured_points import check_points
from itercast.microbench.sweep.cards import card_facts
from itercast.microbench.sweep.collect import GRACE_S

log = logging.getLogger("itercast.campaign")
PREPARED = Path("runs/campaign")  # written by --prepare, read by runs
OUT = Path("runs/gpu")
FINISH_S = 20.0  # at the end of a run: late workers, compaction, the archive
FINISH_FRAC = 0.3  # of the budget, instead of FINISH_S in a short run
LAST_GRACE_S = 10.0  # of the last stage's worker after its budget, before it is killed
SAVE_EVERY_S = 120.0  # between two archives while a stage runs
CUT_FRAC = 0.9  # of its planned time; a stage with less is reported as cut


class Stopped(BaseException):
    """Raised by SIGINT and SIGTERM; the archive is written nevertheless."""


@dataclass(slots=True, kw_only=True)
class Campaign:
    """One run of a campaign: its stages' rows and notes, when stages must end, its archive."""

    run: Run
    archive: Path
    end_s: float  # of the last stage, by time.monotonic()
    began_s: float = field(default_factory=time.monotonic)
    saved_s: float = field(default_factory=time.monotonic)

    def measure(self, stages: Sequence[Stage]) -> None:
        """Measure the stages one after the other; each gets its share of the time left.

        A stage that gets less than its share, because earlier ones took longer, is noted.
        """
        whole_s, stages_s = self.end_s - time.monotonic(), sum(s.seconds for s in stages)
        for i, stage in enumerate(stages):
            planned_s = whole_s * stage.seconds / stages_s
            left_s = self.end_s - time.monotonic()
            budget_s = left_s * stage.seconds / sum(s.seconds for s in stages[i:])
            grace_s = LAST_GRACE_S if stage is stages[-1] else GRACE_S
            self._stage(stage, planned_s, budget_s, grace_s)

    def _stage(self, stage: Stage, planned_s: float, budget_s: float, grace_s: float) -> None:
        """Measure one stage, and note how it ended."""
        plan = f"{planned_s:.0f} s planned"
        if budget_s < stage.least_s:
            self.run.note(f"{stage.name}: skipped, {max(budget_s, 0):.0f} s are left of {plan}")
            return
        log.info("%s: %.0f s", stage.name, budget_s)
        begin_s, rows = time.monotonic(), 0
        ended = "cut" if budget_s < CUT_FRAC * planned_s else "done"
        try:
            rows = stage.measure(self.run, budget_s, grace_s)
        except BaseException as exc:
            ended = f"stopped by {type(exc).__name__}"
            raise
        finally:
            took = f"{time.monotonic() - begin_s:.0f} s of {plan}"
            self.run.note(f"{stage.name}: {ended}, {took}, {rows} rows")
        self.save()

    def progress(self) -> None:
        """Called a few times a second: saves now and then, in case this process is killed."""
        if time.monotonic() - self.saved_s > SAVE_EVERY_S:
            self._try(self.save)

    def save(self) -> None:
        """Write the archive, journals of running workers included."""
        self.saved_s = time.monotonic()
        for path in pack(self.run.root, self.archive):
            log.info("archive: %s, %.1f MiB", path, path.stat().st_size / 2**20)

    def finish(self) -> None:
        """Compact journals, write the archive, log the summary; each even if another fails."""
        ignore_signals()
        for step in (self._compact, self.save, self._summary, self.save):
            self._try(step)

    def _try(self, step: Callable[[], None]) -> None:
        """Do one of the last steps; an error is logged, so that the others are done too."""
        try:
            step()
        except Exception:
            log.exception("the run continues")

    def _compact(self) -> None:
        store.compact(self.run.root, card_facts(self.run.root, "cuda"))

    def _summary(self) -> None:
        """Log the summary of all rows, and the notes of the stages."""
        gpu = card_facts(self.run.root, "cuda")["hardware"]["name"]
        for line in (*summary(self.run.root, gpu), *self.run.notes):
            log.info("%s", line)
        log.info("the run took %.0f s", time.monotonic() - self.began_s)


def stop_on_signals() -> None:
    """Make the first SIGINT or SIGTERM raise ``Stopped``; later ones are ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        ignore_signals()
        raise Stopped(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def log_to(root: Path) -> None:
    """Log also to a file under the root, which is part of the archive."""
    (root / "logs").mkdir(parents=True, exist_ok=True)
    path = root / "logs" / f"campaign-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger().addHandler(file)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python3 -m itercast.extras.campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--plan",
        choices=tuple(PLANS),
        default="first",
        help="first: ops and iterations (default); second: hosts, points of real models, ops in "
        "steps, copies; unseen: points of another GPU, iterations",
    )
    parser.add_argument(
        "--part", default="", help="stages of the plan, separated by commas; default: all"
    )
    parser.add_argument("--budget", type=_duration, help="wall time of this run, e.g. 90s, 9m")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the rows ({OUT})")
    parser.add_argument(
        "--archive", type=Path, help="default: $OUT/campaign.tar.gz, or <--out>.tar.gz"
    )
    parser.add_argument(
        "--from", type=_archive, dest="start", help="archive of an earlier run, or its URL"
    )
    parser.add_argument("--points", type=Path, help="file of points for stage second or points")
    parser.add_argument("--devices", default="1", help="GPUs to use, one worker each: all, or 1, 2")
    parser.add_argument("--seed", type=int, default=0, help="of random points and models")
    parser.add_argument(
        "--prepare", action="store_true", help="capture models, choose points; needs no GPU"
    )
    parser.add_argument(
        "--prepared", type=Path, default=PREPARED, help=f"folder of --prepare ({PREPARED})"
    )
    return parser.parse_args()


def archive_path(args: argparse.Namespace) -> Path:
    """Path of the archive: as given, else in the folder $OUT, else beside the rows."""
    if args.archive:
        return Path(args.archive)
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"]) / "campaign.tar.gz"
    return Path(f"{args.out}.tar.gz")


def campaign(args: argparse.Namespace) -> int:
    """Run a campaign; returns the exit status, 0 where no stage failed."""
    began_s = time.monotonic()
    stages = chosen_stages(args.plan, [p for p in args.part.split(",") if p])
    points = args.points
    if args.plan in PREPARED_POINTS and points is None:
        points = args.prepared / PREPARED_POINTS[args.plan]
    if points is not None:
        log.info("%d points in %s", check_points(points), points)
    devices = gpu_count(args.devices, "cuda")
    if args.start:
        log.info("%d files from %s", unpack(args.start, args.out), args.start)
    use_prepared(args.prepared, args.out, args.seed)
    log_to(args.out)
    budget_s = args.budget or sum(stage.seconds for stage in stages)
    this = Campaign(
        run=Run(root=args.out, seed=args.seed, points=points, devices=devices),
        archive=archive_path(args),
        end_s=began_s + budget_s - min(FINISH_S, FINISH_FRAC * budget_s),
        began_s=began_s,
    )
    this.run.on_progress = this.progress
    stop_on_signals()
    try:
        this.measure(stages)
    except (Stopped, smoke.ImplausibleRows) as exc:
        log.error("the run ends early: %s", exc)
        return 1
    except Exception:
        log.exception("the run ends early")
        return 1
    finally:
        this.finish()
    return 0


def _duration(text: str) -> float:
    """Seconds of ``90s`` or ``9m``; argparse shows the message of this error alone."""
    try:
        return seconds(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _archive(text: str) -> Path:
    """Path of an archive; one at a URL is fetched."""
    try:
        return fetched_file(text)
    except (ValueError, OSError) as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def main() -> None:
    """Run a campaign, or prepare one."""
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        if args.prepare:
            prepare(args.prepared, args.seed, args.start, args.plan)
            return
        raise SystemExit(campaign(args))
    except (ValueError, FileNotFoundError) as exc:
        log.error("%s", exc)
        raise SystemExit(2) from exc
