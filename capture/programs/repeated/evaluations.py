"""Leaves loops that evaluate a model before it is trained: two passes of them say all."""

from __future__ import annotations

import ast
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch

from itercast.capture.opcall import OpCall

PASSES = 2  # of a loop that run
TRAINING = {"backward", "zero_grad"}  # methods


class Evaluations:
    """Notes forwards of models in evaluation, and leaves the loop that makes them after two."""

    def __init__(self, outside_torch: Callable[[str], bool]) -> None:
        self.outside_torch = outside_torch
        self.training = set[tuple[str, int]]()  # lines that run while a model is trained
        self.passes = Counter[tuple[CodeType, int]]()

    def ran(self, model: Any, trains_later: Callable[[], bool]) -> None:
        """Note a forward; a step is no part of its loop where the script ``trains_later``."""
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
        """Whether a loop trains: it was seen to, or calls what only training does."""
        file, lines = frame.f_code.co_filename, range(loop.lineno, (loop.end_lineno or 0) + 1)
        seen = any(of == file and line in lines for of, line in self.training)
        return seen or not TRAINING.isdisjoint(_methods(loop))

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
def _tree(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


@cache
def loops(file: str) -> list[ast.For | ast.While]:
    """The loops in a file's code."""
    return [node for node in ast.walk(_tree(file)) if isinstance(node, ast.For | ast.While)]


@cache
def _methods(loop: ast.For) -> set[str]:
    """Names of methods that a loop calls."""
    return {node.attr for node in ast.walk(loop) if isinstance(node, ast.Attribute)}


def _after(file: str, loop: ast.stmt) -> int:
    """The line of the statement that follows a loop in its block; 0 for none."""
    blocks = (block for node in ast.walk(_tree(file)) for block in vars(node).values())
    for block in blocks:
        if isinstance(block, list) and loop in block[:-1]:
            return int(block[block.index(loop) + 1].lineno)
    return 0


def _leave(frame: FrameType, head: int, after: int) -> None:
    """Let a frame go on after its loop when it comes to its head, as debuggers jump."""

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
    """A forward of a model in evaluation: after so many calls of a step it had made ``storages``.

    ``place``: where it is; ``parameters``: the ids of the model's.
    """

    calls: int
    storages: Collection[int]
    place: Any
    parameters: Collection[int]


def learned_from(calls: Sequence[OpCall], inferences: Sequence[Inference]) -> set[Any]:
    """The places of those whose results backward reads, itself or what was made of them."""
    if not inferences:
        return set()
    bits = {one.place: 1 << n for n, one in enumerate(inferences)}
    came_from, read, waiting = dict[int, int](), 0, list(inferences[::-1])
    for n, call in enumerate(calls):
        while waiting and waiting[-1].calls <= n:
            one = waiting.pop()
            came_from |= {s: came_from.get(s, 0) | bits[one.place] for s in one.storages}
        mark = 0
        for tensor in call.tensors():
            mark |= came_from.get(tensor.storage, 0)
        if call.phase == "backward":
            read |= mark
        elif mark:
            came_from |= {t.storage: came_from.get(t.storage, 0) | mark for t in call.outputs}
    return {place for place, bit in bits.items() if read & bit}
