"""Ends evaluation loops that a script runs before training: two passes show what all launch."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch

from itercast.capture.base.user_errors import syntax_tree
from itercast.capture.opcall import OpCall

PASSES = 2  # of a loop that run
TRAINING = {"backward", "zero_grad"}  # methods
TRAINS = re.compile("(?<!pre)train|^fit|backward")  # in the name of a function that trains

Lines = tuple[tuple[str, int], ...]  # files and lines of calls outside torch, the innermost last


class Evaluations:
    """Notes forwards in evaluation mode, and leaves a loop that makes them after two.

    ``outside_torch`` says whether a file is neither torch's nor Python's.
    """

    def __init__(self, outside_torch: Callable[[str], bool]) -> None:
        self.outside_torch = outside_torch
        self.training = set[tuple[str, int]]()  # lines that run while a model is trained
        self.passes = Counter[tuple[CodeType, int]]()

    def ran(self, model: Any, trains_later: Callable[[], bool]) -> None:
        """Note a forward in evaluation mode; after the second one in a loop, leave that loop.

        The loop goes on if the script never trains (``trains_later``): then it may be what the user
        wants forecast.
        """
        if model.training or torch.is_grad_enabled():
            return
        frame, loop = self._loop(sys._getframe(1))
        if frame is None or not isinstance(loop, ast.For) or self._trains(frame, loop):
            return
        place = (frame.f_code, frame.f_lineno)
        self.passes[place] += 1
        after = _after(frame.f_code.co_filename, loop)
        if after and self.passes[place] % PASSES == 0 and trains_later():
            _leave(frame, loop.lineno, after)

    def _trains(self, frame: FrameType, loop: ast.For) -> bool:
        """Whether a loop trains: training was seen in its lines, or it calls training methods."""
        file, lines = frame.f_code.co_filename, range(loop.lineno, (loop.end_lineno or 0) + 1)
        seen = any(name == file and line in lines for name, line in self.training)
        return seen or not TRAINING.isdisjoint(_called(loop))

    def _loop(self, frame: FrameType | None) -> tuple[FrameType | None, ast.stmt | None]:
        """The innermost frame outside torch that runs a loop, and that loop."""
        while frame is not None:
            file, line = frame.f_code.co_filename, frame.f_lineno
            if self.outside_torch(file):
                around = [x for x in loops(file) if x.lineno <= line <= (x.end_lineno or 0)]
                within = [x for x in around if x.lineno >= frame.f_code.co_firstlineno]
                if within:
                    return frame, max(within, key=lambda loop: loop.lineno)
            frame = frame.f_back
        return None, None


@cache
def loops(file: str) -> list[ast.For | ast.While]:
    """The loops in a file's code."""
    return [node for node in ast.walk(syntax_tree(file)) if isinstance(node, ast.For | ast.While)]


def in_one_loop(place: Lines, other: Lines) -> bool:
    """Whether a loop of the user's code runs both of two stacks of lines.

    The outermost lines are the same up to the frame whose loop runs both.
    """
    for (file, line), (other_file, other_line) in zip(place, other, strict=False):
        first, last = sorted((line, other_line))
        if any(n.lineno <= first and last <= (n.end_lineno or 0) for n in loops(file)):
            return True
        if (file, line) != (other_file, other_line):
            return False
    return False


def rounds(steps: Iterable[Any], lines: Lines) -> int:
    """How many rounds of the innermost loop around ``lines`` steps are, by their backwards."""
    around, passes = _innermost_loop(lines), (one for step in steps for one in step.passes)
    backwards = Counter(at for what, at in passes if what == "backward")
    return max((n for at, n in backwards.items() if _innermost_loop(at) is around), default=1)


def _innermost_loop(place: Lines) -> ast.stmt | None:
    """The innermost loop that runs a stack of lines."""
    for file, line in place[::-1]:
        if around := [x for x in loops(file) if x.lineno <= line <= (x.end_lineno or 0)]:
            return max(around, key=lambda loop: loop.lineno)
    return None


def calls_training(lines: Lines) -> bool:
    """Whether the script, below its first running line, calls a function named like training."""
    file = lines[0][0] if lines else ""
    first = min((line for name, line in lines if name == file), default=0)
    return any(map(TRAINS.search, _called(syntax_tree(file), first)))


@cache
def _called(part: ast.AST, after: int = 0) -> set[str]:
    """Names of the functions and methods that a part of a program calls below a line."""
    calls = (x.func for x in ast.walk(part) if isinstance(x, ast.Call) and x.lineno > after)
    return {getattr(called, "attr", getattr(called, "id", "")) for called in calls}


def _after(file: str, loop: ast.stmt) -> int:
    """The line of the statement that follows a loop in its block; 0 for none."""
    blocks = (block for node in ast.walk(syntax_tree(file)) for block in vars(node).values())
    for block in blocks:
        if isinstance(block, list) and loop in block[:-1]:
            return int(block[block.index(loop) + 1].lineno)
    return 0


def _leave(frame: FrameType, head: int, after: int) -> None:
    """Make a frame jump to line ``after`` when it next comes to line ``head``, as debuggers do."""

    def at_line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and frame.f_lineno == head:
            frame.f_lineno = after  # type: ignore[misc]
            sys.settrace(None)
            return None
        return at_line

    frame.f_trace = at_line
    sys.settrace(lambda *args: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """A forward of a model in evaluation, whose outputs are in ``storages``.

    ``calls``: number of calls in the step when it ended; ``place``: where the script made it;
    ``parameters``: ids of the model's.
    """

    calls: int
    storages: Collection[int]
    place: Any
    parameters: Collection[int]


def learned_from(calls: Sequence[OpCall], inferences: Sequence[Inference]) -> set[Any]:
    """The places of inferences whose outputs backward reads, directly or through other tensors.

    Each storage has its ``origins``: an integer with a bit for each place that it is computed from.
    """
    if not inferences:
        return set()
    bits = {x.place: 1 << n for n, x in enumerate(inferences)}
    origins, read_bits, waiting = dict[int, int](), 0, list(inferences[::-1])
    for n, call in enumerate(calls):
        while waiting and waiting[-1].calls <= n:
            done = waiting.pop()
            origins |= {s: origins.get(s, 0) | bits[done.place] for s in done.storages}
        input_bits = 0
        for tensor in call.tensors():
            input_bits |= origins.get(tensor.storage, 0)
        if call.phase == "backward":
            read_bits |= input_bits
        elif input_bits:
            origins |= {t.storage: origins.get(t.storage, 0) | input_bits for t in call.outputs}
    return {place for place, bit in bits.items() if read_bits & bit}
