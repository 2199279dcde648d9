"""Attempts to capture ranks of a program, one after the other, and what is known after each.

A script cannot run twice in one process, as it leaves things such as the registries of Hydra and
absl. So each attempt is a fork of a process in which no script ran (``in_fork``).
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
from itercast.capture.programs.repeated.forms import UnlikeError

Row = dict[str, Any]


@dataclass(kw_only=True)
class KnownRanks:
    """The ranks captured so far out of those ``wanted``, and the messages between them.

    ``follows``: ranks that captured ranks exchange messages with are wanted, too. ``repeats``:
    equal micro-batches and layers are repeated, not run.
    """

    wanted: list[int]
    follows: bool
    mailbox: Mailbox = field(default_factory=Mailbox)
    done: dict[int, CapturedRank] = field(default_factory=dict)
    repeats: bool = True

    @property
    def complete(self) -> bool:
        """Whether all wanted ranks are captured."""
        return self.done.keys() >= set(self.wanted)

    def attempt(self, capture: Callable[[int, Mailbox, bool], CapturedRank]) -> KnownRanks:
        """Capture one more rank, or learn which rank it waits for, or that nothing repeats."""
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
        """The captured ranks as one: ``passes`` of the first, ``held_bytes`` of the fullest."""
        done = dict(sorted(self.done.items()))
        fields = [rank.fields for rank in done.values()]
        fullest = max(done.values(), key=lambda rank: rank.peak_bytes)
        return ProgramCapture(
            world_size=world_size,
            ranks={number: rank.step for number, rank in done.items()},
            peak_bytes={number: rank.peak_bytes for number, rank in done.items()},
            grouped=any(rank.grouped for rank in done.values()),
            held_bytes=fullest.least_bytes,
            notes=tuple(dict.fromkeys(note for facts in fields for note in facts.get("notes", ()))),
            passes=fields[0].get("passes", ()),
            samples=max(facts.get("samples", 0) for facts in fields),
            rows_given=max(facts.get("rows_given", 0) for facts in fields),
            optimizer_steps=max(facts.get("optimizer_steps", 1) for facts in fields),
            training=fields[0].get("training"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedRank:
    """What a rank launched in a step, its memory, and further ``fields`` of ProgramCapture."""

    step: StepCapture
    peak_bytes: int
    least_bytes: int
    grouped: bool
    fields: Row

    def peers(self) -> set[int]:
        """The ranks that it sends point-to-point messages to, or gets them from."""
        sent = (c.kwargs["peer"] for c in self.step.calls if c.op == COLLECTIVE)
        return {peer for peer in sent if peer >= 0}


Attempt = Callable[[], KnownRanks]


def in_fork(
    tell: Callable[[], object], hear: Callable[[Any], None], attempt: Attempt
) -> KnownRanks:
    """Run ``attempt`` in a forked child, whose side effects are lost unless it completes the ranks.

    Then the child returns from here and carries on as the program, while this parent waits for it
    and exits with its code, as it does if the child fails. Else the child sends back its
    ``KnownRanks``, and the result of ``tell``, which ``hear`` gets in the parent.
    """
    with TemporaryFile() as file:
        if (pid := os.fork()) == 0:
            known = attempt()
            if known.complete:
                return known
            torch.save((known, tell()), file)
            file.flush()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        if not file.seek(0, os.SEEK_END):
            os._exit(code)
        file.seek(0)
        sent: tuple[KnownRanks, Any] = torch.load(file, weights_only=False)  # of our own fork
    hear(sent[1])
    return sent[0]
