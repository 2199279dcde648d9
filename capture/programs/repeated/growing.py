"""Passes that are alike but for sizes: a cache of keys and values is longer by a token in each.

Four passes in a row, whose inputs grow by the same numbers, show the law of the others: each size
in what they launch is a polynomial of the second degree in the number of the pass, as strides of a
square mask are. The fourth has to follow from the first three.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.opcall import OpCall
from itercast.capture.programs.repeated.passes import Kind, Launched
from itercast.capture.programs.repeated.sizes import with_sizes, without_sizes

SHOW = 4  # passes that show a law
NEAR = range(-2, 2)  # of a length to a number: one passes before the first that may differ
Law = Callable[[int], Any]  # from the number of a pass
Term = tuple[Any, Any, Any]  # a number in pass 0, its growth to pass 1, and the growth of growth


def law_of(values: Sequence[Any]) -> Law | None:
    """The law of a value of which the first four are given; None where there is none."""
    first = values[0]
    if all(value == first for value in values):
        return lambda n: first
    patterns, sizes = zip(*map(without_sizes, values), strict=True)
    if any(pattern != patterns[0] for pattern in patterns):
        return None
    if (terms := terms_of(sizes)) is None:
        return None

    def at(n: int) -> Any:
        grown = iter(grown_to(n, terms))
        return with_sizes(patterns[0], lambda _: next(grown))

    return at


def terms_of(values: Sequence[Sequence[Any]]) -> list[Term] | None:
    """The terms of numbers' laws, four values of each number given; None if some have no law."""
    rows = list(zip(*values, strict=True))
    if any(d - 3 * c + 3 * b - a for a, b, c, d in rows):
        return None
    return [(a, b - a, c - 2 * b + a) for a, b, c, _ in rows]


def grown_to(n: int, terms: Sequence[Term]) -> list[Any]:
    """What numbers with these terms are in pass ``n``."""
    return [a + n * by + n * (n - 1) // 2 * more for a, by, more in terms]


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
    """What passes launch whose inputs have sizes that grow, by laws with the terms ``inputs``.

    Where passes read numbers (``reads``), these have terms of what sums them up, too: of masks, and
    of positions. ``calls``, ``others``: laws of what passes launch, and of results and memory.
    ``passes``: how many were asked for. Of these the 8th, 16th, 32nd... run, to be compared, and
    those at ``edges``: in which a length comes to a number that stays, as a window's. ``furthest``:
    the pass that a loop over them ends with; where another loop comes to it, it runs, too. A law
    ``ends`` where a pass differs and the one before did not (it is ``sure``).
    """

    inputs: list[Term]
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
        inputs = terms_of(sizes) if len(sizes) == SHOW else None
        if inputs is None or not any(by and not more for _, by, more in inputs):
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
        lengths = {a for a, *growth in inputs if growth == [1, 0]}
        stay = {a for a, by, more in inputs if not (by or more)}
        stay |= {n for n in attributes if type(n) is int}
        edges = {n - a + d for n in stay for a in lengths for d in NEAR}
        return cls(
            inputs=inputs,
            reads=last.numbers is not None,
            like=like,
            calls=calls,
            others=rest,
            edges=edges.difference(range(SHOW)),
        )

    def launched(self, sizes: Sequence[int], numbers: Sequence[Any]) -> Launched | None:
        """What a pass with these sizes launches, without its calls; None if they grow otherwise."""
        sizes = [*sizes, *summary(numbers if self.reads else None)]
        terms = zip(sizes, self.inputs, strict=True)
        n = max(int((now - a) // by) for now, (a, by, more) in terms if by and not more)
        if sizes != grown_to(n, self.inputs) or n >= self.ends:
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
