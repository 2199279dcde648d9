"""Derives captures of a model at many sizes of micro-batch from captures at a few.

Lengths, strides and counts in a step are ``factor * b**i * (s + d)**j`` of the batch b and the
sequence length s; only the factor depends on the model. Two captures tell which, and a third one
must agree. A step with other numbers is captured at every size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from itercast.capture.opcall import Argument, OpCall, StepCapture, TensorSpec, changed
from itercast.capture.recorder.zeros import mark_zeros

Size = tuple[int, int, bool]  # samples, tokens of each, and whether under autocast
CaptureAt = Callable[[int, int, bool], StepCapture]
POWERS = tuple(product((0, 1), (0, 1, 2)))  # of batch and length
SHIFTS = (0, 1, -1)  # labels may be one token more or fewer than the text


class _NotTheSameStep(Exception):
    """Raised where captures at two sizes are not the same step but for lengths."""


class _Scaling:
    """Derives a capture at a third size of micro-batch from captures at two sizes."""

    def __init__(self, known: tuple[Size, Size], size: Size) -> None:
        self.sizes = (*known, size)
        self.integers: dict[tuple[int, int], int] = {}
        self.tensors: dict[tuple[TensorSpec, TensorSpec], TensorSpec] = {}  # many calls have each

    def value(self, a: Argument, b: Argument) -> Argument:
        """The value at the third size that is ``a`` at the first and ``b`` at the second."""
        if type(a) is TensorSpec and type(b) is TensorSpec:
            if (a, b) not in self.tensors:
                self.tensors[a, b] = self._of_fields(a, b)
            return self.tensors[a, b]
        if a is b or (type(a) is type(b) and a == b):
            return a
        if type(a) is int and type(b) is int:
            if (a, b) not in self.integers:
                self.integers[a, b] = self._integer(a, b)
            return self.integers[a, b]
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(map(self.value, a, b))
        if isinstance(a, Mapping) and a.keys() == b.keys():
            return {key: self.value(a[key], b[key]) for key in a}
        if is_dataclass(a) and not isinstance(a, type) and type(a) is type(b):
            return self._of_fields(a, b)
        raise _NotTheSameStep

    def _of_fields(self, a: Any, b: Any) -> Any:
        """A dataclass with the ``value`` of each field."""
        values = {n: self.value(getattr(a, n), getattr(b, n)) for n in _names(a.__class__)}
        return (changed if type(a) in (TensorSpec, OpCall) else replace)(a, **values)

    def _integer(self, a: int, b: int) -> int:
        """The integer at the third size: c * batch**i * (length + d)**j, as at the first two."""
        for shift, (i, j) in product(SHIFTS, POWERS):
            first, second, third = (n**i * (s + shift) ** j for n, s, _ in self.sizes)
            if a * second == b * first and first and a * third % first == 0:
                return int(a * third // first)
        raise _NotTheSameStep


class CapturesBySize:
    """The captures of a model by size, each made when first asked for.

    Lengths of 1 may have other strides: captures of one sample are derived from larger ones only if
    a check against a real capture of one sample agrees, else from other captures of one sample.
    """

    def __init__(self, capture_at: CaptureAt) -> None:
        self.capture_at = capture_at
        self.made: dict[Size, StepCapture] = {}
        self.failed: dict[Size, str] = {}  # why the model cannot be captured at a size
        self.agree: dict[tuple[Size, ...], bool] = {}  # captured sizes -> whether others follow
        self.sources: dict[Size, list[tuple[Size, ...]]] = {}  # what sizes may be derived from

    def announce(self, sizes: Iterable[Size]) -> None:
        """Choose at which of these sizes the model is captured, so that others are derived."""
        wanted = set(sizes)
        for autocast in {size[2] for size in wanted}:
            of_one = {size for size in wanted if size[0] == 1 and size[2] == autocast}
            of_more = {size for size in wanted if size[0] > 1 and size[2] == autocast}
            chosen = _chosen(of_more)
            with_one = (*chosen[:2], max(of_one, key=_tokens)) if chosen and of_one else ()
            self.sources |= {size: [chosen] for size in of_more}
            self.sources |= {size: [with_one, _chosen(of_one)] for size in of_one}

    def at(self, size: Size) -> StepCapture:
        """The capture at a size; one that was not announced is captured. ValueError if it fails."""
        if size in self.failed:
            raise ValueError(self.failed[size])
        if size not in self.made:
            steps = (self._derived(chosen, size) for chosen in self.sources.get(size, ()))
            step = next(filter(None, steps), None)
            try:
                self.made[size] = step or self.capture_at(*size)
            except ValueError as exc:
                self.failed[size] = str(exc)
                raise
        return self.made[size]

    def _derived(self, chosen: tuple[Size, ...], size: Size) -> StepCapture | None:
        """The capture derived from those at ``chosen`` sizes; None where these do not agree."""
        if not chosen or size in chosen or not self.agree.get(chosen, True):
            return None
        small, large, control = chosen
        try:
            if chosen not in self.agree:
                self.agree[chosen] = self._between(small, large, control) == self.at(control)
            return self._between(small, large, size) if self.agree[chosen] else None
        except (_NotTheSameStep, ValueError):  # or the model cannot run at one of the sizes
            self.agree[chosen] = False
            return None

    def _between(self, small: Size, large: Size, size: Size) -> StepCapture:
        """The step at ``size``, derived from captures at two others."""
        step: StepCapture = _Scaling((small, large), size).value(self.at(small), self.at(large))
        return replace(step, calls=mark_zeros(step.calls))


@cache
def _names(kind: Any) -> list[str]:
    """The fields that change with the size; not that of zeros (see ``mark_zeros``)."""
    return [f.name for f in fields(kind) if f.name != "zero_frac"]


def _chosen(group: set[Size]) -> tuple[Size, ...]:
    """Three sizes to capture: the smallest, the largest, and most samples of the least length.

    Empty where there are too few sizes to derive any.
    """
    if len(group) < 4:
        return ()
    ends = (min(group, key=_tokens), max(group, key=_tokens))
    others = sorted(group - set(ends), key=lambda size: (-size[0], size[1]))
    return (*ends, others[0])


def _tokens(size: Size) -> tuple[int, Size]:
    """Sorts sizes by the tokens of a micro-batch."""
    return size[0] * size[1], size
