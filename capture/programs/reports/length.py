"""How long a script trains, as far as its loops, or those of a library, say so."""

from __future__ import annotations

import ast
import operator
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

from itercast.capture.programs.repeated.evaluations import loops

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {"len": len, "int": int, "range": range}
STEPS, EPOCHS = ("max_steps", "max_train_steps"), ("max_epochs",)  # names of limits
HOLDERS = ("self", "args")  # variables that have such attributes
CUT = {"islice", "zip"}  # functions that may end before a DataLoader does
Line = tuple[str, int]  # file and number


def training_steps(
    innermost: FrameType,
    outside_torch: Callable[[str], bool],
    fed_at: Collection[Line],
    epoch_steps: int,
    at_once: int,
) -> int:
    """Steps of the whole training; 0 where nothing states them.

    It has a pass of ``epoch_steps`` for each round of the loops around the one over the DataLoader,
    whose header is among the lines ``fed_at`` that ran when a batch came. Without such a loop it
    has a step for ``at_once`` rounds of all loops. A limit of a usual name may end it before.
    """
    frames = list[FrameType]()
    for frame, _ in traceback.walk_stack(innermost):
        if outside_torch(frame.f_code.co_filename):
            frames.append(frame)
        if frame.f_code.co_name == "<module>":
            break
    looped = _rounds(frames[::-1], fed_at, epoch_steps, at_once)
    limits = [n for frame in frames for n in _limits(frame, epoch_steps)]
    return min((n for n in (looped, *limits) if n), default=0)


def _rounds(
    frames: list[FrameType], fed_at: Collection[Line], epoch_steps: int, at_once: int
) -> int:
    """Steps by the loops that these frames, the outermost first, run; 0 if one is not known."""
    rounds = 1
    around = [(frame, loop) for frame in frames for loop in _loops_of(frame)]
    for frame, loop in around:
        if not isinstance(loop, ast.For):
            return 0
        header = range(loop.lineno, (loop.iter.end_lineno or loop.lineno) + 1)
        if any((frame.f_code.co_filename, line) in fed_at for line in header):
            return rounds * epoch_steps
        rounds *= _length(loop.iter, frame)
    return rounds // at_once if around else 0


def may_leave(innermost: FrameType, outside_torch: Callable[[str], bool]) -> bool:
    """Whether the loop that asks for a batch may have enough before its DataLoader gave the last.

    So it may where it can be left, takes batches by hand, or cuts the loader short.
    """
    for frame, line in traceback.walk_stack(innermost):
        hands_on = frame.f_code.co_flags & CO_GENERATOR  # as tqdm does
        if hands_on or not outside_torch(frame.f_code.co_filename):
            continue
        for loop in _loops_of(frame)[-1:]:
            if isinstance(loop, ast.While):
                return not isinstance(loop.test, ast.Constant)
            inside = (node for part in loop.body for node in ast.walk(part))
            left = any(isinstance(node, ast.Break | ast.Return) for node in inside)
            names = {getattr(x, "attr", getattr(x, "id", "")) for x in ast.walk(loop.iter)}
            return left or line > (loop.iter.end_lineno or line) or not CUT.isdisjoint(names)
    return False


def _loops_of(frame: FrameType) -> list[ast.For | ast.While]:
    """The loops of a frame's function that it runs now, the outermost first."""
    first, line = frame.f_code.co_firstlineno, frame.f_lineno
    known = loops(frame.f_code.co_filename)
    around = [x for x in known if first <= x.lineno <= line <= (x.end_lineno or 0)]
    return sorted(around, key=lambda loop: loop.lineno)


def _length(iterated: ast.expr, frame: FrameType) -> int:
    """How often a loop over an expression runs; 0 for anything but ``range`` and lists.

    Wrappers around the expression, such as tqdm, are looked through.
    """
    while isinstance(iterated, ast.Call) and getattr(iterated.func, "id", "") not in FUNCTIONS:
        shortened = getattr(iterated.func, "id", getattr(iterated.func, "attr", "")) == "trange"
        if shortened:
            iterated = ast.Call(ast.Name("range"), iterated.args, [])
        elif iterated.args:
            iterated = iterated.args[0]
        else:
            return 0
    with suppress(Exception):  # whatever the script's objects raise
        value = _value(iterated, frame)
        return len(value) if isinstance(value, range | list | tuple) else 0
    return 0


def _value(node: ast.expr, frame: FrameType) -> Any:
    """The value of an expression of names, attributes and numbers in a frame."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in frame.f_locals:
            return frame.f_locals[node.id]
        case ast.Name():
            return frame.f_globals[node.id]
        case ast.Attribute():
            return getattr(_value(node.value, frame), node.attr)
        case ast.Subscript():
            return _value(node.value, frame)[_value(node.slice, frame)]
        case ast.BinOp():
            return OPERATORS[type(node.op)](_value(node.left, frame), _value(node.right, frame))
        case ast.Call(func=ast.Name(id=name)):
            return FUNCTIONS[name](*(_value(x, frame) for x in node.args))
    raise ValueError(f"{ast.unparse(node)}: not looked at")


def _limits(frame: FrameType, epoch_steps: int) -> Iterator[int]:
    """Yields the steps after which variables of a frame, or their attributes, end a training."""
    held = [frame.f_locals.get(name) for name in HOLDERS]
    for names, unit in ((STEPS, 1), (EPOCHS, epoch_steps)):
        for name in names:
            with suppress(Exception):  # whatever the script's objects raise
                found = [frame.f_locals.get(name), *(getattr(x, name, None) for x in held)]
                yield from (n * unit for n in found if type(n) is int and n > 0)
