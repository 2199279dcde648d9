"""Errors to expect of op times: on measured and on unseen GPUs, inside the envelope and outside."""

from __future__ import annotations

import numpy as np

from itercast.capture.base.assumptions import assumed

Offsets = tuple[float, float]  # 10 and 90 % quantiles of log(measured / forecast)
OUTSIDE_WIDENING: float = assumed(__file__, "outside_widening")


def offsets_of_rows(
    seen: Offsets, unseen: Offsets, on_unseen: np.ndarray, inside: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of rows: ``unseen`` where the mask ``on_unseen`` says so, else ``seen``.

    Where a shape is not ``inside`` the envelope they are OUTSIDE_WIDENING times the seen ones, and
    on an unseen GPU no closer than those of its own.
    """
    both = []
    for own, other, wider in zip(seen, unseen, (min, max), strict=True):
        outside = OUTSIDE_WIDENING * own
        known = np.where(inside, own, outside)
        widened = np.where(inside, other, wider(other, outside))
        both.append(np.where(on_unseen, widened, known).astype(float))
    return both[0], both[1]
