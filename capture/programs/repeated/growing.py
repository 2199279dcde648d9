"""Passes that are alike but for sizes: a cache of keys and values is longer by a token in each.

Four passes in a row, whose inputs grow by the same numbers, show the law of the others: each size
in what they launch is a polynomial of the second degree in the number of the pass, as strides of a
square mask are. The fourth has to follow from the first three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.opcall import OpCall
from itercast.capture.programs.repeated.passes import Kind, Launched
from itercast.capture.programs.repeated.sizes import with_sizes, without_sizes

SHOW = 4  # passes that show a law
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
    ``passes``: how many were asked for. Of these the 4th, 8th, 16th... run, to be compared.
    """

    first: list[Any]
    by: list[Any]
    reads: bool
    like: Launched
    calls: list[Law]
    others: Law
    passes: int = SHOW

    @classmethod
    def of(cls, alike: Sequence[Kind], last: Kind) -> Growth | None:
        """The law, if there is one, of the last four of ``alike``, of passes without gradients."""
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
        reads = last.numbers is not None
        return cls(first=sizes[0], by=steps[0], reads=reads, like=like, calls=calls, others=rest)

    def launched(self, sizes: Sequence[int], numbers: Sequence[Any]) -> Launched | None:
        """What a pass with these sizes launches, without its calls; None if they grow otherwise."""
        sizes = [*sizes, *summary(numbers if self.reads else None)]
        grown = [now - first for now, first in zip(sizes, self.first, strict=True)]
        steps = (divmod(int(a), int(b)) for a, b in zip(grown, self.by, strict=True) if int(b))
        n, rest = max(steps)  # passes after the first
        if rest or grown != [n * by for by in self.by]:
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

    def confirms(self) -> bool:
        """Count a pass; whether it is one of those that run to confirm the law."""
        self.passes += 1
        return self.passes & (self.passes - 1) == 0
