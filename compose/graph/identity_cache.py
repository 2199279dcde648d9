"""Results remembered by the identity of what they were computed from: captures, bundles."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

R = TypeVar("R")
KEPT = 128


class _Same:
    """Equal to itself only; holds the value, so that its identity stays its own."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def remembered(function: Callable[..., R]) -> Callable[..., R]:
    """``function(first, *hashable)``, computed once per object ``first`` and equal other arguments.

    For values that never change and are costly to hash; the last 128 results are kept.
    """

    @lru_cache(maxsize=KEPT)
    def known(first: _Same, rest: tuple[Any, ...]) -> R:
        return function(first.value, *rest)

    @wraps(function)
    def wrapped(first: Any, *rest: Any) -> R:
        return known(_Same(first), rest)

    return wrapped
