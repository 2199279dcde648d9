"""The rows one family's learners are fitted on, as arrays, and how they are split by shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from itercast.learners.models.kernels import StatedKernel

Array = Any  # numpy arrays of float


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Encoded features, roofline in us, measured time in us and shape group of the same rows.

    ``origin`` holds the columns of x that say where a row was measured (GPU, software, cluster);
    empty where all rows are one GPU's. ``gpus`` are those of them that are one-hot for the GPU.
    ``stated_kernel`` is the covariance that the family states, if it does.
    """

    x: Array
    roofline_us: Array
    time_us: Array
    group: Array
    origin: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    stated_kernel: StatedKernel | None = None

    def take(self, index: Array) -> Table:
        """Return the rows of these indices as a table."""
        return replace(
            self,
            x=self.x[index],
            roofline_us=self.roofline_us[index],
            time_us=self.time_us[index],
            group=self.group[index],
        )

    def of_gpu(self, column: int) -> Table:
        """The rows of the GPU with this column of x."""
        return self.take(np.flatnonzero(self.x[:, column] > 0))

    @property
    def log_ratio(self) -> Array:
        """The target of all learners: log(measured time / roofline)."""
        return np.log(self.time_us) - np.log(self.roofline_us)


def frozen_split(place: Array, share: float, op: Array) -> tuple[Array, Array]:
    """Split row indices into training and held-out rows by ``place``, a hash of each row's shape.

    Places lie between 0 and 1; those below ``share`` are held out, so that a shape is on the same
    side in every training. One shape of every op stays in training; at least one other shape is
    held out.
    """
    kept = [place[op == name].max() for name in np.unique(op.astype(str))]  # a shape of each op
    free = ~np.isin(place, kept)
    held = free & (place < share)
    if not held.any():
        least = place[free].min() if free.any() else place.min()
        held = place == least
    return np.flatnonzero(~held), np.flatnonzero(held)


def group_split(group: Array, share: float, seed: int) -> tuple[Array, Array]:
    """Split row indices into training rows and those of a share of the shape groups, held out."""
    names = np.random.default_rng(seed).permutation(np.unique(group))
    held = np.isin(group, names[: max(1, int(share * len(names)))])
    return np.flatnonzero(~held), np.flatnonzero(held)
