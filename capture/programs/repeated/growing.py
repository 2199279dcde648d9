"""Passes that are alike but for sizes: a cache of keys and values is longer by a token in each.

Four passes in a row, whose inputs grow by the same numbers, show the law of the others: each size
in what they launch is a polynomial of the second degree in the number of the pass, as strides of a
square mask are. The fourth has to follow from the first three.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.opcall import OpCall
from itercast.capture.programs.repeated.passes import Kind, Launched
from itercast.capture.programs.repeated.sizes import with_sizes, without_sizes

SHOW = 4  # passes that show a law
NEAR = (-1, 0, 1)  # of a length to a number, where both are close
Law = Callable[[int], Any]  # from the number of a pass


def law_of(values: Sequence[Any]) -> Law | None:
    """The law of a value of which the first four are given; None where there is none."""
    first = values[0]
    if all(value == first for value in values):
        return lambda n: first
    patterns, sizes = zip(*map(without_sizes, values), strict=True)
    if any(pattern != patterns[0] for pattern in patterns):
        return None
    rows = list(zip(*sizes, strict=True))
    if any(d - 3 * c + 3 * b - a for a, b, c, d in rows):
        return None
    terms = [(a, b - a, c - 2 * b + a) for a, b, c, _ in rows]

    def at(n: int) -> Any:
        grown = iter([a + n * by + n * (n - 1) // 2 * more for a, by, more in terms])
        return with_sizes(patterns[0], lambda _: next(grown))

    return at


def summary(numbers: Sequence[Any] | None) -> list[Any]:
    """The least, the greatest and the sum of the numbers known of each input; none of None."""
    with _disable_current_modes():
        known = [None if n is None else n.numbers.double() for n in numbers or ()]
        filled = [
            None if n is None or not n.numel() else (n.min(), n.max(), n.sum()) for n in known
        ]
        return [float(x) for three in filled for x in three or (0.0, 0.0, 0.0)]


@dataclass(kw_only=True)
class Growth:
    """What passes launch whose inputs have sizes that grow by ``by`` each, from ``first`` on.

    Where passes read numbers (``reads``), what sums these up grows evenly, too: masks of ones,
    positions. ``calls``, ``others``: laws of what they launch, and of results and memory.

    ``passes``: how many were asked for. Of these the 8th, 16th, 32nd... run, to be compared, and
    those at ``edges``: in which a length comes to a number that stays, as a window's. ``furthest``:
    the pass that a loop over them ends with; where another loop comes to it, it runs, too. A law
    ``ends`` where a pass differs and the one before did not (it is ``sure``).
    """

    first: list[Any]
    by: list[Any]
    reads: bool
    like: Launched
    calls: list[Law]
    others: Law
    edges: set[int]
    passes: int = SHOW
    furthest: int = SHOW - 1
    sure: bool = True
    ends: float = inf

    @classmethod
    def of(cls, alike: Sequence[Kind], last: Kind, attributes: Collection[Any]) -> Growth | None:
        """The law, if there is one, of the last four of ``alike``, of passes without gradients of a
        model with these ``attributes``.
        """
        kinds = [kind for kind in alike if "forward" in kind.last][-SHOW:]
        if kinds[-1] is not last or any(
            (k.numbers is None) != (last.numbers is None) for k in kinds
        ):
            return None
        sizes = [kind.sizes + summary(kind.numbers) for kind in kinds]
        steps = [[b - a for a, b in zip(*two, strict=True)] for two in pairwise(sizes)]
        if len(steps) < SHOW - 1 or not any(steps[0]) or any(step != steps[0] for step in steps):
            return None
        shown = [kind.last["forward"] for kind in kinds]
        like, *others = (replace(one, calls=[], results=None) for one in shown)
        if any(one != like for one in others) or len({len(one.calls) for one in shown}) > 1:
            return None
        laws = [law_of(calls) for calls in zip(*(one.calls for one in shown), strict=True)]
        rest = law_of([(one.results, one.most_bytes, one.kept_bytes) for one in shown])
        if rest is None or None in laws:
            return None
        calls = [law for law in laws if law]
        moves = list(zip(sizes[0], steps[0], strict=True))
        stay = {a for a, by in moves if not by} | {n for n in attributes if type(n) is int}
        edges = {n - a + d for n in stay for a in {a for a, by in moves if by == 1} for d in NEAR}
        return cls(
            first=sizes[0],
            by=steps[0],
            reads=last.numbers is not None,
            like=like,
            calls=calls,
            others=rest,
            edges=edges.difference(range(SHOW)),
        )

    def launched(self, sizes: Sequence[int], numbers: Sequence[Any]) -> Launched | None:
        """What a pass with these sizes launches, without its calls; None if they grow otherwise."""
        sizes = [*sizes, *summary(numbers if self.reads else None)]
        grown = [now - first for now, first in zip(sizes, self.first, strict=True)]
        steps = (divmod(int(a), int(b)) for a, b in zip(grown, self.by, strict=True) if int(b))
        n, rest = max(steps)  # passes after the first
        if rest or grown != [n * by for by in self.by] or n >= self.ends:
            return None
        results, most_bytes, kept_bytes = self.others(n)
        return replace(
            self.like,
            law=self,
            number=n,
            results=results,
            most_bytes=most_bytes,
            kept_bytes=kept_bytes,
        )

    def launches(self, number: int) -> list[OpCall]:
        """The calls of a pass of this number."""
        return [law(number) for law in self.calls]

    def confirms(self, number: int) -> bool:
        """Count a pass; whether it is one of those that run to confirm the law."""
        self.passes += 1
        again, self.furthest = number == self.furthest, max(number, self.furthest)
        confirms = again or number in self.edges or self.passes & (self.passes - 1) == 0
        self.edges.discard(number)
        self.sure &= confirms
        return confirms

    def allows(self, expected: Launched, launched: Launched | None) -> bool:
        """Whether passes that were repeated are right after one ran that was expected otherwise, or
        as it did: the law ends with it if the one before it ran.
        """
        was_sure, self.sure = self.sure, expected == launched
        if not self.sure:
            self.ends = expected.number
        return self.sure or was_sure
