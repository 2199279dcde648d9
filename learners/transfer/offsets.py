"""Errors to expect of op times: on measured and on unseen GPUs, inside the envelope and outside."""

from __future__ import annotations

import numpy as np

from itercast.capture.base.assumptions import assumed

Offsets = tuple[float, float]  # 10 and 90 % quantiles of log(measured / forecast)
OUTSIDE_WIDENING: float = assumed(__file__, "outside_widening")


def offsets_of_rows(
    seen: Offsets, unseen: Offsets, on_unseen: np.ndarray, inside: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (low, high) of each row: ``unseen`` where ``on_unseen`` is set, else ``seen``.

    Where a shape is not ``inside`` the envelope they are OUTSIDE_WIDENING * seen; on an unseen GPU
    the wider ones of these and ``unseen``.
    """
    offsets = []
    for seen_offset, unseen_offset, more_extreme in zip(seen, unseen, (min, max), strict=True):
        outside = OUTSIDE_WIDENING * seen_offset
        of_seen = np.where(inside, seen_offset, outside)
        of_unseen = np.where(inside, unseen_offset, more_extreme(unseen_offset, outside))
        offsets.append(np.where(on_unseen, of_unseen, of_seen).astype(float))
    return offsets[0], offsets[1]
