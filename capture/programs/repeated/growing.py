"""Passes that differ in sizes alone: in decoding, a cache of keys and values grows by a token in
each.

Four passes in a row, whose inputs grow by constant numbers, show the law of the following ones:
each size in what they launch is a polynomial of degree two in the number of the pass. (Strides of a
square mask are quadratic.) The fourth pass has to follow from the first three.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any
from zlib import crc32

import numpy as np
from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.opcall import OpCall
from itercast.capture.programs.repeated.passes import Kind, Launched
from itercast.capture.programs.repeated.sizes import with_sizes, without_sizes

SHOW = 4  # passes that show a law
LISTED = 64  # numbers without an order; of more a checksum
NEAR = range(-2, 2)  # of a length to a number: one passes before the first that may differ
Law = Callable[[int], Any]  # from the number of a pass
Term = tuple[Any, Any, Any]  # a number in pass 0, its growth to pass 1, and the growth of growth


def law_of(values: Sequence[Any]) -> Law | None:
    """Fit the law of a value, given for four passes in a row; None if there is no law."""
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
    """Terms of each number's law, given four values of each; None if some number has none."""
    if len({*map(len, values)}) > 1:
        return None
    rows = list(zip(*values, strict=True))
    if any(d - 3 * c + 3 * b - a for a, b, c, d in rows):
        return None
    return [(a, b - a, c - 2 * b + a) for a, b, c, _ in rows]


def grown_to(n: int, terms: Sequence[Term]) -> list[Any]:
    """What numbers with these terms are in pass ``n``."""
    return [a + n * by + n * (n - 1) // 2 * more for a, by, more in terms]


def described(values: np.ndarray[Any, Any]) -> list[Any]:
    """A short description of the numbers in a tensor, that differs for other numbers of its shape.

    Of each row it has the first two numbers, and where and by how much the steps between numbers
    change: in a mask twice where padding ends, in a causal mask twice a row. Such places grow
    steadily with a mask. Numbers without such an order are described by a checksum.
    """
    rows = values.reshape(-1, values.shape[-1] if values.ndim and values.size else 1)
    turns = np.diff(rows, n=2).ravel()
    places = np.flatnonzero(turns)
    if rows.shape[1] < 3 or 2 * len(places) > rows.size:
        return rows.ravel().tolist() if rows.size <= LISTED else [crc32(rows.tobytes())]
    order = np.argsort(turns[places], kind="stable")
    parts = rows[:, :2].T, places[order], turns[places][order]
    return [number for part in parts for number in (part.size, *described(part))]


def content(numbers: Sequence[Any] | None) -> list[Any]:
    """The numbers known of each input, ``described``; none of None. Infinity counts as 2^31."""
    with _disable_current_modes():
        known = [n.numbers.double().numpy() for n in numbers or () if n is not None]
    finite = [np.clip(np.nan_to_num(values), -(2.0**31), 2.0**31) for values in known]
    return [number for values in finite for number in (values.size, *described(values))]


@dataclass(kw_only=True)
class Growth:
    """The law of passes whose input sizes grow: what pass number n launches.

    ``inputs``: terms of the input sizes, and where passes read values (``reads``) of these, too.
    ``calls``, ``others``: laws of the calls, and of results and memory. Some passes still run, to
    confirm the law: the 8th, 16th, 32nd... of ``passes`` so far; those at ``edges``, where a length
    reaches a constant such as a window's; and number ``furthest``, the last of a finished loop. If
    a pass differs, the law ``ends`` there; ``sure``: the pass before ran and agreed.
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
        """The law of the last four of the passes ``alike``, without gradients; None if none.

        ``attributes``: values of the model's attributes, some of which may be lengths.
        """
        kinds = [kind for kind in alike if "forward" in kind.last][-SHOW:]
        if kinds[-1] is not last or any(
            (k.numbers is None) != (last.numbers is None) for k in kinds
        ):
            return None
        sizes = [kind.sizes + content(kind.numbers) for kind in kinds]
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
        stay = {a for a, by, more in inputs[: len(last.sizes)] if not (by or more)}
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
        """What the law says of a pass with these sizes, without its calls; None if it fails."""
        sizes = [*sizes, *content(numbers if self.reads else None)]
        if len(sizes) != len(self.inputs):
            return None
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
        """Count a repeated pass; returns whether this one has to run, to confirm the law."""
        self.passes += 1
        again, self.furthest = number == self.furthest, max(number, self.furthest)
        confirms = again or number in self.edges or self.passes & (self.passes - 1) == 0
        self.edges.discard(number)
        self.sure &= confirms
        return confirms

    def allows(self, expected: Launched, launched: Launched | None) -> bool:
        """Compare a confirming pass with the law; returns whether repeated ones were right.

        If it differs, the law ends there; passes repeated before were right only if the pass before
        ran.
        """
        was_sure, self.sure = self.sure, expected == launched
        if not self.sure:
            self.ends = expected.number
        return self.sure or was_sure
