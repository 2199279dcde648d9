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
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from types import FrameType
from typing import Any

import torch

from itercast.capture.input.batches import TakenBatches
from itercast.capture.opcall import StepCapture
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.program import Evaluation, ProgramCapture, Training
from itercast.capture.programs.repeated.evaluations import Lines
from itercast.capture.programs.repeated.fold import folded
from itercast.capture.programs.repeated.passes import stood_for
from itercast.capture.programs.reports.length import may_leave, training_steps

BATCHES = 3  # that a DataLoader gives then
LONGEST_S = 15  # no assumption: seconds in which it comes to the end of its epoch, or is ended
LATE = signal.SIGURG  # ignored by default: a script that forgets our handler goes on
AGAIN_S = 1.0  # no assumption: seconds at least, and until it is ended anew where it went on
MOST_ROUNDS = 100  # no assumption: of the data in an epoch; samplers that repeat have a few
ALMOST_ONE = 0.6  # batches a step, where few are counted and some asked for ahead
RUN = (runpy.run_path.__code__, runpy.run_module.__code__)
MORE = 4  # steps for each of the iteration's, after which a script that trains on is ended


class EnoughSteps(BaseException):
    """Raised to end a script when enough of its steps ran: no ``except Exception`` stops it."""


@dataclass(slots=True)
class Passes:
    """Passes over a DataLoader.

    ``taken``: batches of the one that runs; ``batches``: those that finished ones would have had;
    ``samples``: of the last batch; ``evaluation``: what a rank launches from one batch to the next.
    """

    taken: int = 0
    batches: int = 0
    samples: int = 0
    evaluation: StepCapture | None = None


class Epoch:
    """Follows a script to the end of its epoch, and notes its evaluations from batch to batch.

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
        self.log, self.taken, self.over = log, taken, threading.Event()
        self.began_s, self.patience_s = 0.0, inf
        self.heard_before: Any = None  # what heard ``LATE``
        self.lines, self.outside_torch, self.waits = lines, outside_torch, waits
        self.fed_at = dict[Any, Lines]()  # by loader the lines that ran when its last batch came
        self.passes = dict[Any, Passes]()  # by DataLoader, of what follows on the steps
        self.batches, self.at_ends = Counter[Any](), list[Counter[Any]]()  # now, when steps ended
        self.using: Any = None  # the loader of the batch that is used now
        self.evaluates = self.trains = False  # what it is used for
        self.late = False
        self.feeds: Any = None
        self.may_follow, self.follows, self.ended_feeding, self.complete = True, False, False, False
        self.left, self.saved_bytes, self.known = 0, 0, Training()
        taken.came, taken.ends, taken.passed = self.came, self.ends, self.passed

    def came(self) -> None:
        """Note that a batch came: the launches since the last one belong to that one."""
        loader = self.taken.loader
        if self.follows:
            self._close(loader)
            self.log.reset()
            self.using, self.evaluates, self.trains = loader, False, False
            passes = self.passes.setdefault(loader, Passes())
            passes.taken, passes.samples = passes.taken + 1, self.taken.samples[-1]
        self.batches[loader] += 1
        self.fed_at[loader] = self.lines()
        self.log.batch()

    def step_ended(self) -> None:
        """Note how many batches came until a step ended."""
        self.at_ends.append(self.batches.copy())

    def _close(self, asked: Any) -> None:
        """End the use of a batch; keep it if it was an evaluation.

        Where another loader is ``asked`` now, that may be more than a batch of a loop.
        """
        if self.using is not None and self.evaluates and not self.trains:
            passes, log = self.passes[self.using], self.log
            if self.using is asked or passes.evaluation is None:
                calls = folded(log.calls, partial(stood_for, log=log))
                networks, host = tuple(log.networks), dict(log.host)
                passes.evaluation = StepCapture(calls=tuple(calls), host=host, networks=networks)
        self.using = None

    def passed(self, loader: Any) -> None:
        """Note that a loader has no batch left, by itself or since it gave ``BATCHES``.

        Who asks for the next batch before the last one is used has yet to use that.
        """
        if self.evaluates:
            self._close(loader)
        if (passes := self.passes.get(loader)) is not None:
            passes.batches += max(passes.taken, batches_of(loader))
            passes.taken = 0
        self.waits()

    def ends(self, loader: Any) -> bool:
        """Whether the script is told that a loader has no batch left, after few batches.

        So its epoch ends early: the loader of training at once, or after the batch in which
        Lightning evaluates; others after BATCHES, if they say how many they have and the script
        takes all. EnoughSteps if it begins the next epoch.
        """
        if not self.follows:
            return False
        self.complete |= loader is self.feeds and self.ended_feeding
        if self.complete:
            raise EnoughSteps
        if loader is self.feeds:
            self.ended_feeding = True
            return not _last_of_lightning(sys._getframe(1))
        if loader not in self.passes or self.passes[loader].taken < BATCHES:
            return False
        may_end = self.late or not may_leave(sys._getframe(1), self.outside_torch)
        return may_end and batches_of(loader) > 0

    def follow(self, steps: int, at_once: int, rounds: int) -> None:
        """Note how long the script trains, and let it go on; EnoughSteps if it may not.

        ``steps``: how many have ended; ``at_once``: steps of an optimizer in its iteration, 0 where
        it makes none; ``rounds``: of the loop around them in it.
        """
        if not at_once:
            raise EnoughSteps
        self.feeds, self.left = self._feeding(steps), MORE * at_once
        epoch_steps = self._epoch_steps(steps, at_once)
        where = sys._getframe(1), self.outside_torch, self.fed_at.get(self.feeds, ())
        in_all = training_steps(*where, epoch_steps, max(at_once, rounds))
        self.known = Training(epoch_steps=epoch_steps, steps=in_all)
        in_main = threading.current_thread() is threading.main_thread()
        heard = in_main and signal.getsignal(LATE) == self._late
        took_s = time.monotonic() - self.began_s
        in_time = took_s <= self.patience_s
        if not (self.may_follow and self.feeds is not None and heard and in_time):
            raise EnoughSteps
        args = (min(max(took_s, AGAIN_S), LONGEST_S),)
        threading.Thread(target=self._wait, args=args, daemon=True).start()
        self.follows = True

    def _feeding(self, steps: int) -> Any:
        """The DataLoader that ends an epoch: the shortest that the line of the last batch asks.

        A ``zip`` asks several; ``steps``: in which they gave a batch.
        """
        last, first, now = self.taken.loader, self.at_ends[-steps], self.at_ends[-1]
        lines = self.fed_at.get(last)
        asked = [x for x, at in self.fed_at.items() if at == lines and now[x] > first[x]]
        return min(filter(batches_of, asked), key=batches_of, default=last)

    def _epoch_steps(self, steps: int, at_once: int) -> int:
        """Iterations in a pass over the loader that feeds them, by batches of the last steps.

        A step has a whole number of them, or is one of several with the same batch: fractions are
        those of batches that are asked for ahead.
        """
        if self.feeds is None or steps < 2:
            return 0
        first, *_, last = (batches[self.feeds] for batches in self.at_ends[-steps:])
        if not (mean := (last - first) / (steps - 1)) or _never_ends(self.feeds):
            return 0
        of_step = round(mean) if mean > ALMOST_ONE else 1 / round(1 / mean)
        return ceil(batches_of(self.feeds) / of_step / at_once - 1e-9)

    def saved(self, nbytes: int) -> None:
        """Note that so many bytes were saved, unless the script goes on after its epoch."""
        self.saved_bytes += nbytes if self.follows and not self.complete else 0

    def begin(self, patience_s: float) -> None:
        """Note when the script begins; what it restores of signals later on is ours.

        ``patience_s``: if its step takes longer than that, its time limit leaves none to follow it.
        """
        self.began_s, self.patience_s = time.monotonic(), patience_s
        if threading.current_thread() is threading.main_thread():
            self.heard_before = signal.signal(LATE, self._late)

    def _wait(self, seconds: float) -> None:
        """Tell the script's thread after so many seconds that it is late, until it ends."""
        while not self.over.wait(seconds):
            signal.pthread_kill(threading.main_thread().ident or 0, LATE)
            seconds = AGAIN_S

    def _late(self, _: int, frame: FrameType | None) -> None:
        """End the evaluation that runs, else the script.

        Not where the script has ended, and what was patched for it is restored now.
        """
        was_late, self.late = self.late, True
        runs = any(running.f_code in RUN for running, _ in traceback.walk_stack(frame))
        if runs and (was_late or self.using is None):
            raise EnoughSteps

    def close(self) -> None:
        """The script has ended: no time limit ends it any more."""
        self.over.set()
        if self.heard_before is not None:
            signal.signal(LATE, self.heard_before)
        if not self.follows:
            return
        stopped = None if self.complete else self.using
        self._close(None)
        for loader, passes in self.passes.items():  # of loops that the script left, or was ended in
            cut = loader is stopped and passes.taken
            passes.batches += batches_of(loader) if cut else passes.taken
        self.taken.loader, self.follows = self.feeds, False

    def script_ended(self) -> None:
        """Note that the script ended without an error: with its last epoch, unless more follow."""
        self.complete |= self.known.steps - len(self.at_ends) < max(1, self.known.epoch_steps)

    def ended(self, kind: str, owner: Any) -> None:
        """Note the end of a forward, backward or optimizer step (``Steps.end``)."""
        if kind != "forward":
            self.trains = True
        elif not (owner.training and torch.is_grad_enabled()):
            self.evaluates = True
        if self.follows and kind == "optimizer":
            self._trains_after()
            self.left -= 1
            if self.left < 0:
                raise EnoughSteps

    def _trains_after(self) -> None:
        """Note what a new loader feeds: the next epoch (EnoughSteps), or another training loop."""
        if not self.ended_feeding or self.using is None or self.at_ends[-1][self.using]:
            return
        if self.fed_at[self.using] == self.fed_at[self.feeds]:
            self.complete = True
            raise EnoughSteps
        self.known = replace(self.known, steps=0)  # in all loops

    def training(self, rank: int, world_size: int) -> Training:
        """What is known of the whole training."""
        evaluations = tuple(self._evaluations(rank, world_size))
        known = replace(self.known, followed=self.complete, saved_bytes=self.saved_bytes)
        return replace(known, evaluations=evaluations)

    def _evaluations(self, rank: int, world_size: int) -> Iterator[Evaluation]:
        """Yields the evaluations of an epoch."""
        for loader, passes in self.passes.items():
            if loader is self.feeds or passes.evaluation is None or not passes.batches:
                continue
            program = ProgramCapture(
                world_size=world_size,
                ranks={rank: passes.evaluation},
                peak_bytes={rank: 0},
                samples=passes.samples,
                grouped=self.log.grouped,
            )
            lane = self.taken.lane("evaluation", loader)
            yield Evaluation(batches=passes.batches, program=program, lane=lane)


def _never_ends(loader: Any) -> bool:
    """Whether a sampler draws the data so often that a script leaves its loop before it ends."""
    try:
        return len(loader.sampler) > MOST_ROUNDS * len(loader.dataset)
    except Exception:  # whatever the script's objects raise
        return False


def _last_of_lightning(innermost: FrameType) -> bool:
    """Whether Lightning asks for a batch, which it is let take for the last one of its epoch.

    It counts batches, and evaluates in the last one.
    """
    objects = [frame.f_locals.get("self") for frame, _ in traceback.walk_stack(innermost)]
    running = {type(x).__name__: x for x in objects}
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
    except Exception:  # whatever the script's objects raise
        return 0
