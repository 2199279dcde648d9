"""Lets a script whose step is known go on to the end of its epoch, and notes what it does there."""

from __future__ import annotations

import runpy
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from types import FrameType
from typing import Any

import torch

from itercast.capture.input.batches import TakenBatches
from itercast.capture.opcall import Kwargs, OpCall, StepCapture
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.program import Evaluation, ProgramCapture, Training
from itercast.capture.programs.repeated.evaluations import Lines
from itercast.capture.programs.repeated.fold import folded
from itercast.capture.programs.repeated.passes import stood_for
from itercast.capture.programs.reports.length import training_steps

BATCHES = 3  # that a DataLoader gives then
LONGEST_S = 15  # no assumption: seconds in which it comes to the end of its epoch, or is ended
LATE = signal.SIGURG  # ignored by default: a script that forgets our handler goes on
AGAIN_S = 1.0  # no assumption: seconds until it is ended anew where it went on
ALMOST_ONE = 0.6  # batches a step, where few are counted and some asked for ahead
RUN = (runpy.run_path.__code__, runpy.run_module.__code__)
MORE = 4  # steps for each of the iteration's, after which a script that trains on is ended


class EnoughSteps(BaseException):
    """Raised to end a script when enough of its steps ran: no ``except Exception`` stops it."""


@dataclass(slots=True)
class OfBatch:
    """What a rank launches from one batch of a DataLoader to the next.

    ``parameters``: ids of those of models in evaluation.
    """

    samples: int
    calls: list[OpCall] = field(default_factory=list)
    networks: list[Kwargs] = field(default_factory=list)
    host: Counter[str] = field(default_factory=Counter)
    evaluates: bool = False
    trains: bool = False
    parameters: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Passes:
    """Passes over a DataLoader; ``taken``: batches of the running pass, ``in_all``: of all passes.

    ``batches``: how many the finished passes would have had. ``last``: the purpose of the last
    pass.
    """

    taken: int = 0
    in_all: int = 0
    batches: int = 0
    last: OfBatch | None = None


class Epoch:
    """Notes evaluations between batches, and follows a script to the end of its epoch.

    Then the loader that feeds training has no batch left, others have few, and the script is ended
    where it begins the next epoch, goes on training, or takes longer than its steps took.
    """

    def __init__(
        self,
        log: ProgramLog,
        taken: TakenBatches,
        lines: Callable[[], Lines],
        outside_torch: Callable[[str], bool],
        waits: Callable[[], None],
    ) -> None:
        self.log, self.taken, self.began_s, self.over = log, taken, 0.0, threading.Event()
        self.heard_before: Any = None  # what heard ``LATE``
        self.lines, self.outside_torch, self.waits = lines, outside_torch, waits
        self.fed_at: Lines = ()  # the lines that ran when the last batch came
        self.passes, self.before = dict[Any, Passes](), dict[Any, Passes]()  # by DataLoader
        self.at_ends = list[dict[int, int]]()  # batches by id of their loader, when steps ended
        self.running: tuple[Any, OfBatch] | None = None
        self.start, self.host = (0, 0), Counter[str]()  # of the log, when that batch came
        self.feeds: Any = None
        self.may_follow, self.follows, self.ended_feeding, self.complete = True, False, False, False
        self.left, self.saved_bytes, self.known = 0, 0, Training()
        taken.came, taken.ends, taken.passed = self.came, self.ends, self.passed

    def came(self) -> None:
        """Note that a batch came: the launches since the last one belong to that one."""
        self._close(self.taken.loader)
        if self.follows:
            self.log.reset()
        self.running, log = (self.taken.loader, OfBatch(self.taken.samples[-1])), self.log
        self.start, self.host = (len(log.calls), len(log.networks)), Counter(log.host)
        passes = self.passes.setdefault(self.taken.loader, Passes())
        passes.taken, passes.in_all = passes.taken + 1, passes.in_all + 1
        self.fed_at = self.lines()
        log.batch()

    def gather(self) -> None:
        """Take over what was launched since the last look at the log, before the log forgets it."""
        calls, networks = self.start
        if self.running is not None and not self.running[1].trains:
            batch, log = self.running[1], self.log
            offset = len(batch.networks) - networks  # ``within`` counts passes from the log's begin
            new = log.calls[calls:]
            batch.calls += [replace(c, within=c.within + offset) if c.within else c for c in new]
            batch.networks += log.networks[networks:]
            batch.host.update(Counter(log.host) - self.host)
        self.start, self.host = (0, 0), Counter()

    def step_ended(self) -> None:
        """Note how many batches came until a step ended, whose launches the log forgets next."""
        self.gather()
        self.at_ends.append({id(loader): x.in_all for loader, x in self.passes.items()})

    def _close(self, asked: Any) -> None:
        """End what a batch was for; keep it if that was an evaluation.

        Where another loader is ``asked`` now, that may be more than a batch of a loop.
        """
        self.gather()
        if self.running is not None:
            loader, batch = self.running
            kept = self.passes[loader].last if loader is not asked else None
            if batch.evaluates and not batch.trains:
                self.passes[loader].last = kept or batch
        self.running = None

    def passed(self, loader: Any) -> None:
        """Note that a loader has no batch left, by itself or since it gave ``BATCHES``.

        Who asks for the next batch before the last one is used has yet to use that.
        """
        if self.running is not None and self.running[1].evaluates:
            self._close(loader)
        if (passes := self.passes.get(loader)) is not None:
            cut = self.follows and passes.taken >= BATCHES
            passes.batches += batches_of(loader) if cut else passes.taken
            passes.taken = 0
        self.waits()

    def ends(self, loader: Any) -> bool:
        """Whether the script is told that a loader has no batch left, after few batches.

        So its epoch ends early: loaders of evaluations after BATCHES; the loader of training at once,
        or after the batch in which Lightning evaluates. EnoughSteps where it asks for the next epoch.
        """
        if not self.follows:
            return False
        if loader is self.feeds:
            if self.ended_feeding:
                self.complete = True
                raise EnoughSteps
            self.ended_feeding = True
            return not _last_of_lightning(sys._getframe(1))
        return loader in self.passes and self.passes[loader].taken >= BATCHES

    def follow(self, steps: int, at_once: int) -> None:
        """Note how long the script trains, of which so many steps ended; EnoughSteps if it may not go
        on.

        ``at_once``: steps of an optimizer in its iteration, 0 where it makes none.
        """
        if not at_once:
            raise EnoughSteps
        self.feeds, self.left = self.taken.loader, MORE * at_once
        epoch_steps = self._epoch_steps(steps, at_once)
        where = sys._getframe(1), self.outside_torch, self.fed_at
        in_all = training_steps(*where, epoch_steps, at_once)
        self.known = Training(epoch_steps=epoch_steps, steps=in_all)
        in_main = threading.current_thread() is threading.main_thread()
        heard = in_main and signal.getsignal(LATE) == self._late
        if not (self.may_follow and self.feeds is not None and heard):
            raise EnoughSteps
        took_s = min(time.monotonic() - self.began_s, LONGEST_S)
        threading.Thread(target=self._wait, args=(took_s,), daemon=True).start()
        self.running, self.follows = None, True
        self.before, self.passes = self.passes, {}

    def _epoch_steps(self, steps: int, at_once: int) -> int:
        """Iterations in a pass over the loader that feeds them, by batches of the last steps.

        A step has a whole number of them, or is one of several with the same batch: fractions are
        those of batches that are asked for ahead.
        """
        if self.feeds is None or steps < 2:
            return 0
        first, *_, last = (x.get(id(self.feeds), 0) for x in self.at_ends[-steps:])
        if not (mean := (last - first) / (steps - 1)):
            return 0
        of_step = round(mean) if mean > ALMOST_ONE else 1 / round(1 / mean)
        return ceil(batches_of(self.feeds) / of_step / at_once - 1e-9)

    def saved(self, nbytes: int) -> None:
        """Note that so many bytes were saved."""
        self.saved_bytes += nbytes if self.follows else 0

    def begin(self) -> None:
        """Note when the script begins; what it restores of signals later on is ours."""
        self.began_s = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self.heard_before = signal.signal(LATE, self._late)

    def _wait(self, seconds: float) -> None:
        """Tell the script's thread after so many seconds that it is late, until it ends."""
        while not self.over.wait(seconds):
            signal.pthread_kill(threading.main_thread().ident or 0, LATE)
            seconds = AGAIN_S

    def _late(self, _: int, frame: FrameType | None) -> None:
        """End the script, unless it has ended and what was patched for it is restored now."""
        if any(running.f_code in RUN for running, _ in traceback.walk_stack(frame)):
            raise EnoughSteps

    def close(self) -> None:
        """The script has ended: no time limit ends it any more."""
        self.over.set()
        if self.heard_before is not None:
            signal.signal(LATE, self.heard_before)
        if not self.follows:
            return
        stopped = self.running[0] if self.running and not self.complete else None
        self._close(None)
        for loader, passes in self.passes.items():  # of loops that the script left, or was ended in
            passes.batches += batches_of(loader) if loader is stopped else passes.taken
        self.taken.loader, self.follows = self.feeds, False

    def script_ended(self) -> None:
        """Note that the script ended without an error: with its only epoch, unless more follow."""
        self.complete |= self.known.steps <= self.known.epoch_steps

    def ended(self, kind: str, owner: Any) -> None:
        """Note the end of a forward, backward or optimizer step (``Steps.end``)."""
        if self.running is not None:
            batch, forward = self.running[1], kind == "forward"
            batch.trains |= not forward
            if forward and not (owner.training and torch.is_grad_enabled()):
                batch.evaluates = True
                batch.parameters.update(map(id, owner.parameters()))
        if self.follows and kind == "optimizer":
            self.left -= 1
            if self.left < 0:
                raise EnoughSteps

    def training(self, rank: int, world_size: int, trained: set[int]) -> Training:
        """What is known of the whole training; ``trained``: ids of parameters that are."""
        evaluations = tuple(self._evaluations(rank, world_size, trained))
        known = replace(self.known, followed=self.complete, saved_bytes=self.saved_bytes)
        return replace(known, evaluations=evaluations)

    def _evaluations(self, rank: int, world_size: int, trained: set[int]) -> Iterator[Evaluation]:
        """Yields the evaluations of an epoch; where none came at its end those before training.

        These are of a model with ``trained`` parameters.
        """
        found = [(x, y.last, y.batches) for x, y in self.passes.items() if y.last]
        if not found:
            before = ((x, y.last, batches_of(x)) for x, y in self.before.items() if y.last)
            found = [one for one in before if trained & one[1].parameters]
        for loader, batch, batches in found:
            if loader is self.feeds or not batches:
                continue
            calls = tuple(folded(batch.calls, partial(stood_for, log=self.log)))
            step = StepCapture(calls=calls, host=dict(batch.host), networks=tuple(batch.networks))
            program = ProgramCapture(
                world_size=world_size,
                ranks={rank: step},
                peak_bytes={rank: 0},
                samples=batch.samples,
                grouped=self.log.grouped,
            )
            lane = self.taken.lane("evaluation", loader)
            yield Evaluation(batches=batches, program=program, lane=lane)


def _last_of_lightning(innermost: FrameType) -> bool:
    """Whether Lightning asks for a batch, which it is let take for the last one of its epoch.

    It counts batches, and evaluates in the last one.
    """
    running = {type(frame.f_locals.get("self")).__name__: frame.f_locals.get("self")
               for frame, _ in traceback.walk_stack(innermost)}  # fmt: skip
    loop: Any = running.get("_TrainingEpochLoop")
    fetcher: Any = running.get("_PrefetchDataFetcher")
    if loop is None or fetcher is None or fetcher.length is None:
        return False
    fetcher.length = fetcher.fetched + 1
    if loop.trainer.val_check_batch == loop.trainer.num_training_batches:
        loop.trainer.val_check_batch = loop.batch_idx + 2  # which counts from 0 to the batch before
    return True


def batches_of(loader: Any) -> int:
    """The batches of a pass over a DataLoader; 0 where it does not say."""
    try:
        return len(loader)
    except TypeError:
        return 0
