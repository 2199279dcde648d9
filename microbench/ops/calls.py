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
    other values are arguments themselves. ``operands``: by name, values, or functions that make
    them; a function is called once if the arguments name it, else never.
    """
    values: dict[str, Any] = {}

    def value(stated: Any) -> Any:
        if isinstance(stated, list):
            return [value(argument) for argument in stated]
        if not isinstance(stated, str):
            return stated
        if stated not in values:
            operand = operands[stated]
            values[stated] = operand() if callable(operand) else operand
        return values[stated]

    named = {
        k: value(v)
        for argument in arguments
        if isinstance(argument, dict)
        for k, v in argument.items()
    }
    args = [value(argument) for argument in arguments if not isinstance(argument, dict)]
    call = getattr(torch, op) if "device" in named else _overload(op, args, named)
    return lambda: call(*args, **named)


def _overload(op: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The overload of an op that takes these arguments, as ``torch.ops.aten.mean.dim``.

    ``torch.ops.aten.mean`` tries one after the other in each call, and each that does not fit costs
    10 to 15 us; a step calls torch's own binding, which tries none.
    """
    packet = getattr(torch.ops.aten, op)
    return getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **named))


def answers_of(
    table: Mapping[str, str], *readers: Callable[[OpCall], P]
) -> dict[str, Callable[[OpCall], P]]:
    """The function that reads a call, by the op's captured name.

    ``table``: names of ops, as ``sum.default``, by the name of the function that reads them.
    """
    return {f"aten.{op}": read for read in readers for op in table[read.__name__].split()}
