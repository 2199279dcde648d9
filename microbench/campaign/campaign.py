"""All that is measured on a GPU box in a given time, brought home as one file.

    python3 -m microbench.campaign --part smoke,ops --budget 580s
    python3 -m microbench.campaign --part iterations,second --budget 540s
    python3 -m microbench.campaign --plan unseen --budget 440s

Each line goes on from what ``--out`` holds, or from ``--from ARCHIVE``. Before, at home and without
a GPU: ``--prepare``. However a run ends, what it measured is in the archive; it needs neither git
nor make.
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

from microbench import store
from microbench.campaign import smoke
from microbench.campaign.archive import pack, unpack
from microbench.campaign.prepare import UNSEEN, prepare, use_prepared
from microbench.campaign.stages import PLANS, Run, Stage, chosen_stages
from microbench.campaign.summary import summary
from microbench.durations import seconds
from microbench.sweep.captured_points import check_points
from microbench.sweep.cards import card_facts
from microbench.sweep.collect import LATE_S

log = logging.getLogger("itercast.campaign")
PREPARED = Path("runs/campaign")  # what --prepare leaves, and a run on the box finds
OUT = Path("runs/gpu")
FINISH_S = 20.0  # of a run: late workers, compaction, the archive
FINISH_FRAC = 0.3  # of a short run
LAST_LATE_S = 10.0  # after its time the last stage's worker is ended
SAVE_EVERY_S = 120.0  # the archive is written anew while a stage runs
CUT_FRAC = 0.9  # of the plan's time: a stage with less is said to be cut


class Stopped(BaseException):
    """Raised when the run is asked to end; its archive is still written."""


@dataclass(slots=True, kw_only=True)
class Campaign:
    """One run: what it measures, when it must be over, where its archive goes."""

    run: Run
    archive: Path
    end_s: float  # by time.monotonic(), of the last stage
    began_s: float = field(default_factory=time.monotonic)
    saved_s: float = field(default_factory=time.monotonic)

    def measure(self, stages: Sequence[Stage]) -> None:
        """The stages one after the other; each has its share of the time that is left."""
        whole_s = self.end_s - time.monotonic()
        for at, stage in enumerate(stages):
            planned_s = whole_s * stage.seconds / sum(s.seconds for s in stages)
            left = stages[at:]
            left_s = self.end_s - time.monotonic()
            given_s = left_s * stage.seconds / sum(s.seconds for s in left)
            self._stage(stage, planned_s, given_s, LATE_S if len(left) > 1 else LAST_LATE_S)

    def _stage(self, stage: Stage, planned_s: float, given_s: float, late_s: float) -> None:
        """One stage, and a line on it whatever becomes of it."""
        plan = f"{planned_s:.0f} s planned"
        if given_s < stage.least_s:
            self.run.tell(f"{stage.name}: skipped, {max(given_s, 0):.0f} s left of {plan}")
            return
        log.info("%s: %.0f s", stage.name, given_s)
        begin_s, rows = time.monotonic(), 0
        ended = "cut" if given_s < CUT_FRAC * planned_s else "done"
        try:
            rows = stage.measure(self.run, given_s, late_s)
        except BaseException as exc:
            ended = f"stopped by {type(exc).__name__}"
            raise
        finally:
            took = f"{time.monotonic() - begin_s:.0f} s of {plan}"
            self.run.tell(f"{stage.name}: {ended}, {took}, {rows} rows")
        self.save()

    def progress(self) -> None:
        """Called a few times a second: an archive now and then, should this process be killed."""
        if time.monotonic() - self.saved_s > SAVE_EVERY_S:
            self._try(self.save)

    def save(self) -> None:
        """The archive as of now; journals of workers at work are in it."""
        self.saved_s = time.monotonic()
        for path in pack(self.run.root, self.archive):
            log.info("archive: %s, %.1f MiB", path, path.stat().st_size / 2**20)

    def finish(self) -> None:
        """Whole parts, the archive, the summary; each of them also where another fails."""
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)
        for step in (self._compact, self.save, self._summary, self.save):
            self._try(step)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            log.exception("the run goes on")

    def _compact(self) -> None:
        store.compact(self.run.root, card_facts(self.run.root, "cuda"))

    def _summary(self) -> None:
        gpu = card_facts(self.run.root, "cuda")["hardware"]["name"]
        for line in (*summary(self.run.root, gpu), *self.run.told):
            log.info("%s", line)
        log.info("whole run: %.0f s", time.monotonic() - self.began_s)


def stop_on_signals() -> None:
    """SIGINT and SIGTERM end the run once; later ones do not disturb its end."""

    def stop(number: int, frame: FrameType | None) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)
        raise Stopped(signal.Signals(number).name)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, stop)


def log_to(root: Path) -> None:
    """Lines to the terminal and to a file that travels with the rows."""
    (root / "logs").mkdir(parents=True, exist_ok=True)
    path = root / "logs" / f"campaign-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger().addHandler(file)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", choices=tuple(PLANS), default="first")
    parser.add_argument("--part", default="", help="stages, by commas; all without it")
    parser.add_argument("--budget", type=seconds, help="of this run, its end included: 90s, 9m")
    parser.add_argument("--out", type=Path, default=OUT, help=f"root of rows ({OUT})")
    parser.add_argument(
        "--archive", type=Path, help="default: $OUT/campaign.tar.gz, or beside --out"
    )
    parser.add_argument("--from", type=Path, dest="start", help="an earlier run's archive")
    parser.add_argument("--points", type=Path, help="of itercast points: a second pass, or unseen")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prepare", action="store_true", help="at home; needs no GPU")
    parser.add_argument("--prepared", type=Path, default=PREPARED, help=f"folder ({PREPARED})")
    return parser.parse_args()


def archive_path(asked: argparse.Namespace) -> Path:
    """Where the archive goes: a box that gives files back names their folder in $OUT."""
    if asked.archive:
        return Path(asked.archive)
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"]) / "campaign.tar.gz"
    return Path(f"{asked.out}.tar.gz")


def campaign(asked: argparse.Namespace) -> int:
    """Run the plan; 0 where all its stages could end."""
    began_s = time.monotonic()
    stages = chosen_stages(asked.plan, [p for p in asked.part.split(",") if p])
    points = asked.points
    if asked.plan == "unseen" and points is None:
        points = asked.prepared / UNSEEN
    if points is not None:
        log.info("%d points of %s", check_points(points), points)
    if asked.start:
        log.info("%d files of %s", unpack(asked.start, asked.out), asked.start)
    use_prepared(asked.prepared, asked.out, asked.seed)
    log_to(asked.out)
    budget_s = asked.budget or sum(stage.seconds for stage in stages)
    this = Campaign(
        run=Run(root=asked.out, seed=asked.seed, points=points),
        archive=archive_path(asked),
        end_s=began_s + budget_s - min(FINISH_S, FINISH_FRAC * budget_s),
        began_s=began_s,
    )
    this.run.on_progress = this.progress
    stop_on_signals()
    try:
        this.measure(stages)
    except (Stopped, smoke.Senseless) as exc:
        log.error("the run ends early: %s", exc)
        return 1
    except Exception:
        log.exception("the run ends early")
        return 1
    finally:
        this.finish()
    return 0


def main() -> None:
    """Run a campaign, or prepare for one."""
    asked = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        if asked.prepare:
            prepare(asked.prepared, asked.seed, asked.start)
            return
        raise SystemExit(campaign(asked))
    except (ValueError, FileNotFoundError) as exc:
        log.error("%s", exc)
        raise SystemExit(2) from exc


if __name__ == "__main__":
    main()
