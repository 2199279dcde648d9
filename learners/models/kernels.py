"""The covariance a family states for its curves, on the columns a learner sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from learners.models.gaussian_process import Kernel
from microbench.ops.family import Family

NOISE = 0.04  # standard deviation of a measurement's log time


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The covariance over ``columns`` of x."""

    columns: tuple[int, ...]
    kernel: Kernel


def stated_curves(family: Family, places: Callable[[list[str]], tuple[int, ...]]) -> Curves | None:
    """As the family says; ``places`` finds the columns of features. None where it says nothing."""
    if not family.curve:
        return None
    names = dict.fromkeys([*family.along, *(n for part in family.curve for n in part.reach)])
    where = {name: places([name]) for name in names}
    columns = list(dict.fromkeys(column for found in where.values() for column in found))
    square = np.zeros((len(family.curve), len(columns)))
    for row, part in zip(square, family.curve, strict=True):
        for name, reach in part.reach.items():
            row[[columns.index(column) for column in where[name]]] += reach**-2
    kernel = Kernel(
        inverse=np.sqrt(square),
        amplitude=np.array([part.amplitude for part in family.curve]),
        noise=NOISE,
        along=len(family.along),
        ends=family.ends,
    )
    return Curves(columns=tuple(columns), kernel=kernel)
