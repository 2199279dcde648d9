"""The covariance a family states for its curves, on the columns a learner sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from learners.process import Kernel
from microbench.ops.family import Family

NOISE = 0.04  # standard deviation of a measurement's log time


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The covariance over ``columns`` of x; the first ``along`` grow alike along a curve."""

    columns: tuple[int, ...]
    along: int
    kernel: Kernel


def stated_curves(family: Family, places: Callable[[list[str]], tuple[int, ...]]) -> Curves | None:
    """As the family says; ``places`` finds the columns of features. None where it says nothing."""
    if not family.curve:
        return None
    names = dict.fromkeys([*family.along, *(n for part in family.curve for n in part.reach)])
    where = [(name, column) for name in names for column in places([name])]
    inverse = [[1 / part.reach.get(name, np.inf) for name, _ in where] for part in family.curve]
    amplitude = [part.amplitude for part in family.curve]
    kernel = Kernel(inverse=np.array(inverse), amplitude=np.array(amplitude), noise=NOISE)
    columns = tuple(column for _, column in where)
    return Curves(columns=columns, along=len(family.along), kernel=kernel)
