"""Keeps results of costly functions by the identity of their first argument, a capture or bundle.

All caches of this package, by what they keep:

- ``cached_by_identity`` (below): what is computed from a capture or a bundle, large values that
  never change and cost too much to hash: rewritten steps, price books of a bundle. The last 512
  results of each function.
- ``PriceBook`` (``pricing/price_book.py``): prices of ops, collectives and host calls by their
  parameters, for one bundle, GPU and number of threads; shared by all plans.
- ``once_of`` (below): rank graphs and priced models of a capture, by what of the plan and of its
  placement they depend on. ``PricedModel.once`` (``pricing/layer_prices.py``): chunks of layers and
  their simulated times, likewise; shared by all plans with the same rank graph.
- ``CapturesBySize`` (``sizes.py``): captures by micro-batch and length, for one search.
- ``functools.lru_cache`` and ``cache``: results of a few small hashable values: pipeline schedules
  by degrees (``simulate/pipeline.py``), bundles by path and time of change (``target.py``).
- ``functools.cached_property``: a value derived from one frozen object; lives as long as it.
- Captures on disk (``capture/recorder/cache.py``), by a digest of the case and of the code, and
  answers of models (``learners/kept_answers.py``), by one of question, bundle and code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any, TypeVar

from itercast.capture.opcall import StepCapture

R = TypeVar("R")
MAX_RESULTS = 512  # per function


class _ById:
    """A dictionary key by a value's identity; it holds the value, so that its id is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value


class Once:
    """Results that are computed once per key, by functions of no arguments.

    A key starts with a name that only one kind of result has.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, compute: Callable[[], R]) -> R:
        """The result kept under this key; ``compute`` makes it the first time."""
        if key not in self._results:
            self._results[key] = compute()
        result: R = self._results[key]
        return result

    def __contains__(self, key: Hashable) -> bool:
        """Whether a result is kept under this key."""
        return key in self._results


def cached_by_identity(function: Callable[..., R]) -> Callable[..., R]:
    """Computes ``function(first, *rest)`` once per object ``first`` and equal ``rest``.

    ``first`` must never change; ``rest`` must be hashable.
    """

    @lru_cache(maxsize=MAX_RESULTS)
    def cached(first: _ById, rest: tuple[Any, ...]) -> R:
        return function(first.value, *rest)

    @wraps(function)
    def wrapped(first: Any, *rest: Any) -> R:
        return cached(_ById(first), rest)

    return wrapped


@cached_by_identity
def once_of(capture: StepCapture) -> Once:
    """The results of a capture that are kept by what they depend on."""
    return Once()
