"""Builds the Gaussian-process kernel that an op family specifies, over encoded feature columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.learners.models.gaussian_process import Kernel
from itercast.microbench.ops.family import Family

NOISE = assumed(__file__, "noise")  # standard deviation of a measurement's log time


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedKernel:
    """A Gaussian-process kernel that a family's file specifies, so that it is not learned.

    ``columns``: the columns of x that are its inputs.
    """

    columns: tuple[int, ...]
    kernel: Kernel


def stated_kernel(
    family: Family, columns_of: Callable[[list[str]], tuple[int, ...]]
) -> StatedKernel | None:
    """Build the kernel that the family's file specifies; None where it specifies none.

    ``columns_of`` returns the columns of x of features by name.
    """
    if not family.kernel:
        return None
    scaled = (name for term in family.kernel for name in term.length_scales)
    names = dict.fromkeys([*family.along, *scaled])
    columns_by_name = {name: columns_of([name]) for name in names}
    columns = list(
        dict.fromkeys(column for of_feature in columns_by_name.values() for column in of_feature)
    )
    square = np.zeros((len(family.kernel), len(columns)))
    for row, term in zip(square, family.kernel, strict=True):
        for name, length in term.length_scales.items():
            row[[columns.index(column) for column in columns_by_name[name]]] += length**-2
    kernel = Kernel(
        inverse=np.sqrt(square),
        amplitude=np.array([term.amplitude for term in family.kernel]),
        noise=NOISE,
        along=len(family.along),
        ends=family.ends,
    )
    return StatedKernel(columns=tuple(columns), kernel=kernel)
