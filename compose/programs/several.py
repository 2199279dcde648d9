"""Captures of a script for several numbers of ranks, none made twice."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from itercast.capture.opcall import OpCall, StepCapture, changed
from itercast.capture.programs.program import Evaluation, ProgramCapture, Training
from itercast.compose.programs.scripts import (
    POLL_S,
    CapturedScript,
    ScriptOrder,
    TooMuchMemoryError,
    capturing,
)

UNKNOWN = object()  # a value that two numbers of ranks do not tell for those between


def captured_scripts(orders: Sequence[ScriptOrder]) -> list[CapturedScript | ValueError]:
    """Captures of one script as several numbers of ranks on several GPUs, or why there is none.

    For each GPU the least and the greatest number are captured first, side by side on two cores. If
    the two differ only by the number of ranks (groups of all ranks, factors such as 1 / ranks),
    those between are derived from them; else more are captured, from both ends. Kept captures are
    read, also such as were made for another GPU, if they hold for this one (``Answers``).
    """
    captures = dict[int, CapturedScript | ValueError]()  # by index of the order
    by_gpu = dict[str, list[int]]()
    for i, order in enumerate(orders):
        by_gpu.setdefault(order.target.gpu.name, []).append(i)
    for indices in by_gpu.values():
        sizes = {i: orders[i].world_size for i in indices}
        while missing := sorted((i for i in indices if i not in captures), key=sizes.__getitem__):
            least, most = missing[0], missing[-1]
            ends = [least, most] if sizes[least] < sizes[most] else [least]
            captures |= zip(ends, _captured([orders[i] for i in ends]), strict=True)
            captures |= _filled_in(captures, sizes)
    return [captures[i] for i in range(len(orders))]


def _filled_in(
    captures: Mapping[int, CapturedScript | ValueError], sizes: Mapping[int, int]
) -> dict[int, CapturedScript | ValueError]:
    """Missing captures that follow from those of the next smaller and larger number of ranks.

    Both arguments are by index of an order; ``sizes``: numbers of ranks, of one GPU.
    """
    known = {i: x for i, x in captures.items() if i in sizes and not isinstance(x, ValueError)}
    filled = dict[int, CapturedScript | ValueError]()
    for i in sizes.keys() - captures.keys():
        less = max((j for j in known if sizes[j] < sizes[i]), key=sizes.__getitem__, default=None)
        more = min((j for j in known if sizes[j] > sizes[i]), key=sizes.__getitem__, default=None)
        if less is None or more is None or not _same_loader(known[less], known[more]):
            continue
        program = program_between(known[less].program, known[more].program, sizes[i])
        if program is not None:
            filled[i] = replace(known[more], program=program)
    return filled


def _same_loader(a: CapturedScript, b: CapturedScript) -> bool:
    """Whether two DataLoaders are alike, however long their batches took."""

    def settings(lane: Any) -> Any:
        return lane and (lane.loader, lane.workers, lane.batch_samples, lane.copied_ahead)

    return bool(settings(a.lane) == settings(b.lane))


def program_between(
    less: ProgramCapture, more: ProgramCapture, world_size: int
) -> ProgramCapture | None:
    """The program for a number of ranks between two; None if it cannot be derived from them.

    Both must launch the same ops on the same shapes, as rank 0, with groups of all ranks. Numbers
    among the arguments stay, or grow with the number of ranks, or with its inverse.
    """
    plain = replace(less, world_size=more.world_size, ranks=more.ranks, training=more.training)
    if plain != more or less.ranks.keys() != {0} or more.ranks.keys() != {0}:
        return None
    step_of_less, step_of_more = less.ranks[0], more.ranks[0]
    alike = replace(step_of_less, calls=()) == replace(step_of_more, calls=())
    if not alike or len(step_of_less.calls) != len(step_of_more.calls):
        return None
    by_ranks = _ByRanks(fewer=less.world_size, more=more.world_size, wanted=world_size)
    calls = list[OpCall]()
    for a, b in zip(step_of_less.calls, step_of_more.calls, strict=True):
        if (call := by_ranks.call(a, b)) is None:
            return None
        calls.append(call)
    step: StepCapture = replace(step_of_less, calls=tuple(calls))
    program = replace(less, world_size=world_size, ranks={0: step}, training=None)
    if less.training is None or more.training is None:
        return program
    training = _training_between(less.training, more.training, by_ranks)
    return replace(program, training=training) if training else None


def _training_between(less: Training, more: Training, by_ranks: _ByRanks) -> Training | None:
    """The training with another number of ranks; None if its evaluations cannot be derived."""
    evaluations = list[Evaluation]()
    if len(less.evaluations) != len(more.evaluations):
        return None
    for a, b in zip(less.evaluations, more.evaluations, strict=True):
        program = program_between(a.program, b.program, by_ranks.wanted)
        if program is None:
            return None
        batches = by_ranks.shared(a.batches, b.batches)
        evaluations.append(Evaluation(batches=batches, program=program, lane=b.lane))
    epoch_steps = by_ranks.shared(less.epoch_steps, more.epoch_steps)
    epochs = more.steps / more.epoch_steps if more.epoch_steps else 0.0
    steps = round(epochs * epoch_steps) or by_ranks.shared(less.steps, more.steps)
    steps = min(steps, less.steps)  # more ranks make no more of them; a limit by steps stays
    return replace(more, epoch_steps=epoch_steps, steps=steps, evaluations=tuple(evaluations))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByRanks:
    """Derives calls and values for ``wanted`` ranks from those for ``fewer`` and ``more`` ranks."""

    fewer: int
    more: int
    wanted: int

    def call(self, a: OpCall, b: OpCall) -> OpCall | None:
        """The call that is ``a`` for fewer ranks and ``b`` for more; None if it does not follow."""
        if a == b:
            return a
        if a.kwargs.keys() != b.kwargs.keys():
            return None
        args = self.value(a.args, b.args)
        kwargs = {name: self.value(value, b.kwargs[name]) for name, value in a.kwargs.items()}
        same_otherwise = changed(a, args=b.args, kwargs=b.kwargs) == b
        unknown = args is UNKNOWN or any(value is UNKNOWN for value in kwargs.values())
        return changed(a, args=args, kwargs=kwargs) if same_otherwise and not unknown else None

    def shared(self, a: int, b: int) -> int:
        """How many of a number of things is each rank's: ``a`` of fewer, ``b`` of more ranks."""
        return b if a == b else ceil(a * self.fewer / self.wanted)

    def value(self, a: Any, b: Any) -> Any:
        """The argument that is ``a`` for fewer ranks and ``b`` for more, or ``UNKNOWN``."""
        if type(a) is not type(b):
            return UNKNOWN
        if a == b:
            return a
        if isinstance(a, tuple):
            if (a, b) == (tuple(range(self.fewer)), tuple(range(self.more))):
                return tuple(range(self.wanted))
            values = [self.value(x, y) for x, y in zip(a, b, strict=False)]
            unknown = len(a) != len(b) or any(value is UNKNOWN for value in values)
            return UNKNOWN if unknown else tuple(values)
        if type(a) is int and a * self.more == b * self.fewer and a % self.fewer == 0:
            return a // self.fewer * self.wanted
        if type(a) is float and a * self.more == b * self.fewer:
            return a / self.fewer * self.wanted
        if type(a) is float and a * self.fewer == b * self.more:
            return a * self.fewer / self.wanted
        return UNKNOWN


def _captured(orders: Sequence[ScriptOrder]) -> list[CapturedScript | ValueError]:
    """Captures of scripts, or errors; scripts run side by side where there are cores.

    They share the memory that one may take. A script that needs more runs again by itself.
    """
    at_once = min(len(orders), os.cpu_count() or 1)
    captures = dict[int, CapturedScript | ValueError]()
    waiting = dict(enumerate(orders))
    while waiting:
        running = {i: capturing(waiting.pop(i), 1 / at_once) for i in list(waiting)[:at_once]}
        try:
            while running:
                for i, generator in list(running.items()):
                    try:
                        next(generator)
                    except (StopIteration, ValueError) as ended:
                        captures[i] = ended.value if isinstance(ended, StopIteration) else ended
                        del running[i]
                time.sleep(POLL_S if running else 0)
        finally:
            for generator in running.values():
                generator.close()
        if at_once > 1:
            lacking = [i for i, x in captures.items() if isinstance(x, TooMuchMemoryError)]
            waiting |= {i: orders[i] for i in lacking}
            at_once = 1
    return [captures[i] for i in range(len(orders))]
