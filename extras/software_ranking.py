"""How well forecasts rank software for a call."""

from __future__ import annotations

import numpy as np
import pandas as pd

SOFTWARE = ("top1_pct", "top3_pct", "pairwise_pct", "slower_pct")  # see ``software_metrics``


def software_metrics(
    call: np.ndarray, stack: np.ndarray, guess: np.ndarray, measured: np.ndarray, fewest: int
) -> dict[str, float]:
    """How well forecasts tell under which software stack each call is the fastest, in %.

    One entry of ``call``, ``stack``, ``guess`` (predicted) and ``measured`` times per row; rows of
    a call under one stack are averaged. Of the ``calls`` with ``fewest`` stacks or more, {}
    without: ``top1_pct``, ``top3_pct``: calls whose fastest stack is forecast as the fastest, or
    among three; ``pairwise_pct``: pairs of a call's stacks in the right order, mean over calls;
    ``slower_pct``: how much longer the stack forecast as fastest takes than the fastest, mean.
    """
    times = pd.DataFrame({"guess": guess, "measured": measured}).groupby([call, stack]).mean()
    scores = []
    for _, of_call in times.groupby(level=0):
        if len(of_call) >= fewest:
            predicted, truth = of_call["guess"].to_numpy(), of_call["measured"].to_numpy()
            order, best = np.argsort(predicted, kind="stable"), truth.argmin()
            right = np.sign(predicted[:, None] - predicted) == np.sign(truth[:, None] - truth)
            pairs = right[np.triu_indices(len(of_call), 1)].mean()
            slower = truth[order[0]] / truth[best] - 1
            scores.append((best == order[0], best in order[:3], pairs, slower))
    if not scores:
        return {}
    means = (100 * np.mean(scores, axis=0)).tolist()
    return {**dict(zip(SOFTWARE, means, strict=True)), "calls": float(len(scores))}
