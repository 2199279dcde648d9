"""Finds the steps of a script: where one ends and the next begins."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from itercast.microbench.programs.batches import TakenBatches
from itercast.microbench.programs.log import ProgramLog

# What ends a step, from what says least. CUDA graphs are warmed up on a stream of their own.
KINDS = ("forward", "backward", "warm-up", "optimizer")
PATIENCE = 4  # times the forwards asked for, until a script without an optimizer makes none


class EnoughSteps(BaseException):
    """Ends a script when enough of its steps ran; no ``except Exception`` of it stops this."""


class Steps:
    """Tells the steps of a running script, and keeps what its rank launched in the last of them.

    A step ends with each step of the first optimizer. In a script that makes none it ends with each
    backward that is called from the same line, in one without these with each forward of a module.
    ``line`` tells the line that runs now; ``name`` says what a step is, if none of an optimizer.
    """

    def __init__(
        self, wanted: int, log: ProgramLog, taken: TakenBatches, line: Callable[[], str]
    ) -> None:
        self.wanted, self.log, self.taken, self.line = wanted, log, taken, line
        self.kind, self.ends = 0, Counter[Hashable]()
        self.kept: tuple[Any, ...] = ()
        self.enough, self.name = False, ""
        log.ended = self.end

    @property
    def done(self) -> int:
        """How many steps ended."""
        return max(self.ends.values(), default=0)

    def end(self, kind: str, owner: Any) -> None:
        """Note the end of one of ``KINDS``; owner: the optimizer, or the module."""
        at = KINDS.index("warm-up" if kind == "optimizer" and self.log.stream else kind)
        if at >= self.kind:
            line = self.line() if kind != "optimizer" else ""
            self._end(at, (id(owner), line), line)

    def _end(self, kind: int, place: Hashable, line: str) -> None:
        if self.log.after_graph is not None:  # it ends whenever the graph is launched
            self.log.after_graph.append(partial(self._end, kind, place, line))
            return
        if kind > self.kind:
            self.kind, self.ends, self.kept = kind, Counter(), ()
        self.ends[place] += 1
        if place != max(self.ends, key=self.ends.__getitem__):  # the first of the most frequent
            return
        if self.done == self.wanted:
            log = self.log
            self.kept = (log.calls, log.host, log.peak_bytes, self.taken.samples)
            self.name = f"from one {KINDS[kind]} to the next{line}" if line else ""
        self.log.reset()
        self.taken.begin_step()
        self.enough = self.enough or bool(self.kept and self._is_all())
        if self.enough:
            raise EnoughSteps

    def _is_all(self) -> bool:
        """Whether nothing that says more of a step is expected."""
        kind = KINDS[self.kind]
        if kind in ("forward", "backward"):
            times = PATIENCE if kind == "forward" else 1
            made = (type(one) for one in gc.get_objects())
            last = self.done == times * self.wanted
            return last and not any(issubclass(one, Optimizer) for one in made)
        return kind == "optimizer"

    def restore(self) -> None:
        """Let the log and the batches be those of the step that was kept."""
        log = self.log
        log.calls, log.host, log.peak_bytes, self.taken.samples = self.kept
