"""Captures of a script as so many and as other numbers of ranks, none made twice."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from itercast.capture.opcall import OpCall, StepCapture, changed
from itercast.capture.programs.program import ProgramCapture
from itercast.compose.programs.scripts import (
    POLL_S,
    CapturedScript,
    ScriptOrder,
    TooMuchMemoryError,
    capturing,
)

NO_NUMBER = object()  # what two numbers of ranks do not tell of those between


def captured_scripts(orders: Sequence[ScriptOrder]) -> list[CapturedScript | ValueError]:
    """Captures of one script as several numbers of ranks on several GPUs, or why there is none.

    Of a GPU the least number and the greatest are captured first, beside each other where this
    machine has two cores. Where what they launch differs by the number of ranks alone (groups of
    all ranks, factors such as 1 / ranks), those between are filled in; else they are captured, from
    both ends. What is kept is read, a capture for another GPU too where it holds (``Answers``).
    """
    found = dict[int, CapturedScript | ValueError]()
    rows = dict[str, list[int]]()
    for i, order in enumerate(orders):
        rows.setdefault(order.target.gpu.name, []).append(i)
    for row in rows.values():
        sizes = {i: orders[i].world_size for i in row}
        while left := sorted((i for i in row if i not in found), key=sizes.__getitem__):
            ends = [left[0], left[-1]] if sizes[left[0]] < sizes[left[-1]] else left[:1]
            found |= zip(ends, _captured([orders[i] for i in ends]), strict=True)
            found |= _between(found, sizes)
    return [found[i] for i in range(len(orders))]


def _between(
    found: Mapping[int, CapturedScript | ValueError], sizes: Mapping[int, int]
) -> dict[int, CapturedScript | ValueError]:
    """Those not found yet that follow from the two found next to them."""
    known = {i: x for i, x in found.items() if i in sizes and not isinstance(x, ValueError)}
    filled = dict[int, CapturedScript | ValueError]()
    for i in sizes.keys() - found.keys():
        less = max((j for j in known if sizes[j] < sizes[i]), key=sizes.__getitem__, default=None)
        more = min((j for j in known if sizes[j] > sizes[i]), key=sizes.__getitem__, default=None)
        if less is None or more is None or not _one_lane(known[less], known[more]):
            continue
        made = program_between(known[less].program, known[more].program, sizes[i])
        if made is not None:
            filled[i] = replace(known[more], program=made)
    return filled


def _one_lane(one: CapturedScript, other: CapturedScript) -> bool:
    """Whether two DataLoaders are alike, whatever their batches took."""

    def told(lane: Any) -> Any:
        return lane and (lane.loader, lane.workers, lane.batch_samples, lane.copied_ahead)

    return bool(told(one.lane) == told(other.lane))


def program_between(
    less: ProgramCapture, more: ProgramCapture, world_size: int
) -> ProgramCapture | None:
    """The program of a number of ranks between two; None where these say nothing of it.

    They launch the same ops on the same shapes, as rank 0. Groups are of all ranks in both, and
    numbers that ops are given stay, grow with the number of ranks, or with its inverse.
    """
    plain = replace(less, world_size=more.world_size, ranks=more.ranks)
    if plain != more or less.ranks.keys() != {0} or more.ranks.keys() != {0}:
        return None
    one, other = less.ranks[0], more.ranks[0]
    alike = replace(one, calls=()) == replace(other, calls=())
    if not alike or len(one.calls) != len(other.calls):
        return None
    number = _Number(less=less.world_size, more=more.world_size, wanted=world_size)
    calls = list[OpCall]()
    for a, b in zip(one.calls, other.calls, strict=True):
        if (call := number.call(a, b)) is None:
            return None
        calls.append(call)
    step: StepCapture = replace(one, calls=tuple(calls))
    return replace(less, world_size=world_size, ranks={0: step})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Number:
    """What is ``wanted`` of a number of ranks, by what it is of ``less`` and of ``more``."""

    less: int
    more: int
    wanted: int

    def call(self, a: OpCall, b: OpCall) -> OpCall | None:
        if a == b:
            return a
        if a.kwargs.keys() != b.kwargs.keys():
            return None
        args = self.value(a.args, b.args)
        kwargs = {name: self.value(value, b.kwargs[name]) for name, value in a.kwargs.items()}
        same = changed(a, args=b.args, kwargs=b.kwargs) == b
        unknown = args is NO_NUMBER or any(one is NO_NUMBER for one in kwargs.values())
        return changed(a, args=args, kwargs=kwargs) if same and not unknown else None

    def value(self, a: Any, b: Any) -> Any:
        """An argument, or ``NO_NUMBER``."""
        if type(a) is not type(b):
            return NO_NUMBER
        if a == b:
            return a
        if isinstance(a, tuple):
            if (a, b) == (tuple(range(self.less)), tuple(range(self.more))):
                return tuple(range(self.wanted))
            each = [self.value(x, y) for x, y in zip(a, b, strict=False)]
            unknown = len(a) != len(b) or any(one is NO_NUMBER for one in each)
            return NO_NUMBER if unknown else tuple(each)
        if type(a) is int and a * self.more == b * self.less and a % self.less == 0:
            return a // self.less * self.wanted
        if type(a) is float and a * self.more == b * self.less:
            return a / self.less * self.wanted
        if type(a) is float and a * self.less == b * self.more:
            return a * self.less / self.wanted
        return NO_NUMBER


def _captured(orders: Sequence[ScriptOrder]) -> list[CapturedScript | ValueError]:
    """Captures of scripts, which run beside each other where there are cores; or why there is none.

    They share the memory that one may take. One that needs more of it runs again by itself.
    """
    at_once = min(len(orders), os.cpu_count() or 1)
    found = dict[int, CapturedScript | ValueError]()
    waiting = dict(enumerate(orders))
    while waiting:
        running = {i: capturing(waiting.pop(i), 1 / at_once) for i in list(waiting)[:at_once]}
        try:
            while running:
                for i, one in list(running.items()):
                    try:
                        next(one)
                    except (StopIteration, ValueError) as ended:
                        found[i] = ended.value if isinstance(ended, StopIteration) else ended
                        del running[i]
                time.sleep(POLL_S if running else 0)
        finally:
            for one in running.values():
                one.close()
        if at_once > 1:
            lacking = [i for i, one in found.items() if isinstance(one, TooMuchMemoryError)]
            waiting |= {i: orders[i] for i in lacking}
            at_once = 1
    return [found[i] for i in range(len(orders))]
