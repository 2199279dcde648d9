"""Calls of torch's ops from tables: the arguments of each, and which function reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from itercast.capture.base.slow_imports import torch
from itercast.capture.opcall import OpCall

P = TypeVar("P")


def call_of(op: str, arguments: Sequence[Any], operands: Mapping[str, Any]) -> Callable[[], Any]:
    """A call of ``torch.ops.aten.OP`` (``torch.OP`` on a device) with arguments of a table.

    A text stands for an operand, a list for a list of arguments, a mapping for keyword arguments;
    other values are arguments themselves. ``operands``: values, or functions that make them, of
    which only those are called that the arguments name.
    """
    made: dict[str, Any] = {}

    def value(stated: Any) -> Any:
        if isinstance(stated, list):
            return [value(one) for one in stated]
        if not isinstance(stated, str):
            return stated
        if stated not in made:
            given = operands[stated]
            made[stated] = given() if callable(given) else given
        return made[stated]

    named = {k: value(v) for one in arguments if isinstance(one, dict) for k, v in one.items()}
    args = [value(one) for one in arguments if not isinstance(one, dict)]
    call = getattr(torch if "device" in named else torch.ops.aten, op)
    return lambda: call(*args, **named)


def answers_of(
    table: Mapping[str, str], *readers: Callable[[OpCall], P]
) -> dict[str, Callable[[OpCall], P]]:
    """The function that reads a call, by the op's captured name.

    ``table``: names of ops, as ``sum.default``, by the name of the function that reads them.
    """
    return {f"aten.{op}": read for read in readers for op in table[read.__name__].split()}
