"""Attempts to capture ranks of a program, one after the other, and what is known after each.

What a script leaves in its process, such as the registries of Hydra and absl, fails a second run:
each of its attempts is a fork of a process in which no script ran (``in_fork``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import Any

import torch

from itercast.capture.opcall import StepCapture
from itercast.capture.programs.objects import AwaitedError, Mailbox
from itercast.capture.programs.program import COLLECTIVE, ProgramCapture
from itercast.capture.programs.repeated.passes import UnlikeError

Row = dict[str, Any]


@dataclass(kw_only=True)
class KnownRanks:
    """What is known of the ``wanted`` ranks; where it ``follows``, also of those they talk to."""

    wanted: list[int]
    follows: bool
    mailbox: Mailbox = field(default_factory=Mailbox)
    done: dict[int, CapturedRank] = field(default_factory=dict)
    repeats: bool = True

    @property
    def complete(self) -> bool:
        return self.done.keys() >= set(self.wanted)

    def attempt(self, capture: Callable[[int, Mailbox, bool], CapturedRank]) -> KnownRanks:
        """Capture one rank more, or learn of what it waits for, or that layers are unlike."""
        waiting = [rank for rank in self.wanted if rank not in self.done]
        ready = [rank for rank in waiting if not self.mailbox.lacks(rank)]
        if not ready:
            raise ValueError(f"ranks {waiting} wait for each other's objects")
        rank, peers = ready[-1], set[int]()
        try:
            self.done[rank] = capture(rank, self.mailbox, self.repeats)
            peers = self.done[rank].peers() if self.follows else peers
        except AwaitedError as exc:
            peers = {exc.rank}
        except UnlikeError:
            self.repeats = False
        self.wanted += sorted(peers - set(self.wanted))
        return self

    def program(self, world_size: int) -> ProgramCapture:
        """All of them as one program."""
        done = dict(sorted(self.done.items()))
        told = [rank.told for rank in done.values()]
        return ProgramCapture(
            world_size=world_size,
            ranks={r: one.step for r, one in done.items()},
            peak_bytes={r: one.peak_bytes for r, one in done.items()},
            grouped=any(one.grouped for one in done.values()),
            held_bytes=max(done.values(), key=lambda one: one.peak_bytes).least_bytes,
            notes=tuple(dict.fromkeys(x for one in told for x in one.get("notes", ()))),
            passes=told[0].get("passes", ()),
            samples=max(one.get("samples", 0) for one in told),
            optimizer_steps=max(one.get("optimizer_steps", 1) for one in told),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedRank:
    """What a rank launched in a step, its memory, and what it ``told`` of the program."""

    step: StepCapture
    peak_bytes: int
    least_bytes: int
    grouped: bool
    told: Row

    def peers(self) -> set[int]:
        """The ranks that it exchanges messages with, one by one."""
        sent = (c.kwargs["peer"] for c in self.step.calls if c.op == COLLECTIVE)
        return {peer for peer in sent if peer >= 0}


Attempt = Callable[[], KnownRanks]


def in_fork(
    tell: Callable[[], object], hear: Callable[[Any], None], attempt: Attempt
) -> KnownRanks:
    """Make an attempt in a fork; the fork with which what is known is complete goes on.

    Of others this process gets what they know, and ``hear`` gets what ``tell`` says in them. Where
    a fork goes on, or ends otherwise, this process ends as it does.
    """
    with TemporaryFile() as told:
        if (pid := os.fork()) == 0:
            known = attempt()
            if known.complete:
                return known
            torch.save((known, tell()), told)
            told.flush()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        if not told.seek(0, os.SEEK_END):
            os._exit(code)
        told.seek(0)
        others: tuple[KnownRanks, Any] = torch.load(told, weights_only=False)  # of our own fork
    hear(others[1])
    return others[0]
