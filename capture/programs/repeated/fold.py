"""Launches of micro-batches that are alike are kept once, with how often they are repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from itercast.capture.opcall import OpCall, TensorSpec, changed
from itercast.capture.programs.program import AGAIN

KEPT = 3  # of those alike: one after others, one that is repeated, one before others


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Launches from one mark to the next; ``made``: the memory that they come to first, in order.

    ``told``: what parts that are alike have in common.
    """

    calls: Sequence[OpCall]
    made: list[int]
    told: list[Any]


def again(times: int) -> OpCall:
    """The mark before launches that are made so many times."""
    return OpCall(op=AGAIN, args=(times,))


def folded(calls: Sequence[OpCall]) -> list[OpCall]:
    """The launches of a step where a mark is before each micro-batch.

    Of alike ones in a row three are left, of which the second is marked as repeated.
    """
    starts = [i for i, call in enumerate(calls) if call.op == AGAIN]
    if not starts:
        return list(calls)
    left = list(calls[: starts[0]])
    parts = _parts(calls, starts)
    for _, group in groupby(parts, key=lambda part: part.told):
        alike = list(group)
        if len(alike) <= KEPT:
            left += [call for part in alike for call in part.calls]
            continue
        first, second, *_, skipped, last = alike
        numbers = {t.storage: t.storage for call in last.calls for t in call.touched}
        numbers |= zip(skipped.made, second.made, strict=True)
        end = [renumbered(call, numbers.__getitem__) for call in last.calls]
        left += [*first.calls, again(len(alike) - 2), *second.calls, again(1), *end]
    return left + list(calls[starts[-1] + 1 :])


def renumbered(call: OpCall, storage: Callable[[int], int], **fields: Any) -> OpCall:
    """A call on other memory, given the number for each of its own; and with other ``fields``."""

    def value(one: Any) -> Any:
        if isinstance(one, TensorSpec):
            return changed(one, storage=storage(one.storage))
        return tuple(map(value, one)) if isinstance(one, tuple) else one

    fields["kwargs"] = {name: value(one) for name, one in call.kwargs.items()}
    return changed(call, args=value(call.args), outputs=value(call.outputs), **fields)


def _parts(calls: Sequence[OpCall], starts: Sequence[int]) -> Iterator[Part]:
    """The launches between marks."""
    used = {t.storage for call in calls[: starts[0]] for t in call.touched}
    compiled, before = {0}, dict[int, int]()
    for a, b in pairwise(starts):
        memory, functions = _Names(used, before), _Names(compiled, {})
        told = [_told(call, memory, functions) for call in calls[a + 1 : b]]
        yield Part(calls=calls[a + 1 : b], made=list(memory.own), told=told)
        used |= memory.own.keys()
        compiled |= functions.own.keys()
        before = memory.own


class _Names:
    """Names for the numbers of a part, by which it is told from others.

    Those that were ``used`` before it keep their numbers, new ones are numbered in its order. So
    were those of the part ``before`` it.
    """

    def __init__(self, used: set[int], before: dict[int, int]) -> None:
        self.used, self.before, self.own = used, before, dict[int, int]()

    def __call__(self, number: int) -> tuple[str, int]:
        if number in self.before:
            return "before", self.before[number]
        if number in self.used:
            return "used", number
        return "own", self.own.setdefault(number, len(self.own))


def _told(call: OpCall, memory: _Names, functions: _Names) -> tuple[Any, ...]:
    """What a call has in common with the same one of another part."""

    def named(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            facts = (value.shape, value.stride, value.dtype, value.layout, value.nnz)
            return *facts, value.zero_frac, memory(value.storage)
        return tuple(map(named, value)) if isinstance(value, tuple) else value

    tensors = named((call.args, tuple(call.kwargs.items()), call.outputs))
    place = call.phase, call.module, call.stream, call.graphed, call.within
    return call.op, tensors, place, functions(call.compiled)
