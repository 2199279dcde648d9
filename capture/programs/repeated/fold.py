"""Keeps one of several equal micro-batches in a list of launches, with their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from itercast.capture.base.garbage import without_garbage_collection
from itercast.capture.opcall import OpCall, TensorSpec, changed
from itercast.capture.programs.program import AGAIN

KEPT = 3  # of those alike: one after others, one that is repeated, one before others
PASS = "itercast.pass"  # a call that stands for many ``launches``
BLOCK = 13  # growing parts for which one stands: an odd number, so that these have odd sizes, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The launches of a micro-batch: from one mark to the next.

    ``made``: storages first used here, in order; ``pattern``: what equal parts have in common,
    apart from their ``sizes``.
    """

    calls: Sequence[OpCall]
    made: list[int]
    pattern: list[Any]
    sizes: list[int]


def again(times: int) -> OpCall:
    """The mark before launches that are made ``times`` times."""
    return OpCall(op=AGAIN, args=(times,))


@without_garbage_collection()
def folded(
    calls: Sequence[OpCall], stood_for: Callable[[OpCall], Sequence[OpCall]]
) -> list[OpCall]:
    """The launches of a step with equal micro-batches kept once, after a mark that counts them.

    ``stood_for`` returns the launches for which a call of ``PASS`` stands. Marks with number 0, of
    passes without gradients, are used only if that leaves fewer launches.
    """
    marks = {call.args[0] for call in calls if call.op == AGAIN}
    unmarked = ([c for c in calls if c.op != AGAIN or c.args[0] >= least] for least in marks)
    left = min(map(_folded, unmarked), key=_launches, default=list(calls))
    return [x for call in left for x in (stood_for(call) if call.op == PASS else [call])]


def _launches(calls: Sequence[OpCall]) -> int:
    """How many launches these calls stand for."""
    return sum(call.kwargs.get("launches", 1) for call in calls)


def _folded(calls: Sequence[OpCall]) -> list[OpCall]:
    """Keep few of each run of equal parts; a part is the launches between two marks.

    The first and the last stay. Between them one stays for each block, after a mark that says how
    many it stands for. What a kept part reads of a dropped one, it reads of the part kept before
    it.
    """
    starts = [i for i, call in enumerate(calls) if call.op == AGAIN]
    left = list(calls[: starts[0]])
    for _, group in groupby(_parts(calls, starts), key=lambda part: part.pattern):
        alike = list(group)
        if len(alike) <= KEPT:
            left += [call for part in alike for call in part.calls]
            continue
        left += alike[0].calls
        before = alike[0]
        for at, times in _standing_for([part.sizes for part in alike]):
            numbers = {t.storage: t.storage for call in alike[at].calls for t in call.touched}
            numbers |= zip(alike[at - 1].made, before.made, strict=True)
            left += [again(times), *(renumbered(c, numbers.__getitem__) for c in alike[at].calls)]
            before = alike[at]
    return left + list(calls[starts[-1] + 1 :])


def _standing_for(sizes: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yields (index of a part to keep, how many parts it stands for), after the first part.

    Neighbours of equal sizes have one for all. Where sizes steadily grow or shrink, the middle one
    of each ``BLOCK`` parts is kept. All others, and the last, stand for themselves.
    """
    begin, last = 1, len(sizes) - 1
    while begin < last:
        ends = (n for n in range(begin, last) if sizes[n] != sizes[begin])
        if (end := next(ends, last)) <= begin + 1:
            end = min(begin + BLOCK, last)
            rows = [list(row) for row in zip(*sizes[begin:end], strict=True)]
            grow = all(sorted(row) in (row, row[::-1]) for row in rows)
            end = end if grow else begin + 1
        yield (begin + end) // 2, end - begin
        begin = end
    yield last, 1


def renumbered(call: OpCall, storage: Callable[[int], int], **fields: Any) -> OpCall:
    """A copy of a call with storages renumbered by ``storage``, and with other ``fields``."""

    def moved(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            number = storage(value.storage)
            return value if number == value.storage else changed(value, storage=number)
        return tuple(map(moved, value)) if isinstance(value, tuple) else value

    fields["kwargs"] = {name: moved(value) for name, value in call.kwargs.items()}
    return changed(call, args=moved(call.args), outputs=moved(call.outputs), **fields)


def _parts(calls: Sequence[OpCall], starts: Sequence[int]) -> Iterator[Part]:
    """The launches between marks, which are at the indices ``starts``."""
    used = {t.storage for call in calls[: starts[0]] for t in call.touched}
    compiled, before = {0}, dict[int, int]()
    for start, end in pairwise(starts):
        memory, functions, sizes = _Names(used, before), _Names(compiled, {}), list[int]()
        pattern = [_pattern(call, memory, functions, sizes) for call in calls[start + 1 : end]]
        made = list(memory.own)
        yield Part(calls=calls[start + 1 : end], made=made, pattern=pattern, sizes=sizes)
        used |= memory.own.keys()
        compiled |= functions.own.keys()
        before = memory.own


class _Names:
    """Numbers storages of a part in order, so that equal parts get equal names.

    Storages ``used`` before the part keep their numbers; new ones are counted from 0 in order of
    use, and so are those that the part ``before`` it made.
    """

    def __init__(self, used: set[int], before: dict[int, int]) -> None:
        self.used, self.before, self.own = used, before, dict[int, int]()

    def __call__(self, number: int) -> tuple[str, int]:
        if number in self.before:
            return "before", self.before[number]
        if number in self.used:
            return "used", number
        return "own", self.own.setdefault(number, len(self.own))


def _pattern(call: OpCall, memory: _Names, functions: _Names, sizes: list[int]) -> tuple[Any, ...]:
    """What a call has in common with the same one of another part; its integers go to ``sizes``."""

    def named(value: Any) -> Any:
        if type(value) is int:
            sizes.append(value)
            return 0
        if isinstance(value, TensorSpec):
            numbers = named((*value.shape, *value.stride, value.nnz))
            facts = value.dtype, value.layout, value.zero_frac
            return len(value.shape), numbers, *facts, memory(value.storage)
        return tuple(map(named, value)) if isinstance(value, tuple | list) else value

    tensors = named((call.args, tuple(call.kwargs.items()), call.outputs))
    place = call.phase, call.module, call.stream, call.graphed, call.within
    return call.op, tensors, place, functions(call.compiled)
