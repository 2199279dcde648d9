"""How many tokens each expert of a rank gets, where some experts are more popular than others.

Tokens are spread by a power law: an expert's share is drawn from a density proportional to share **
-skew between 1 and ``popular_share`` of the tokens. Only the busiest of the ranks that hold experts
counts, since the others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.microbench.ops.family import Point

Column = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Count = Callable[[Column, float], Column]  # of tokens by expert, and of all tokens
DRAWS = 16  # of the experts' popularity, to take the mean over
POPULAR_SHARE: float = assumed(__file__, "popular_share")


def busiest_loads(tokens: float, experts: int, topk: float, local: int, skew: float) -> Column:
    """Tokens of each of the ``local`` experts on the busiest rank, (draws, local).

    All are tokens * topk / experts where skew is 0. No expert gets more than all tokens. A draw
    gives the experts the same popularities for any number of tokens.
    """
    if not skew:
        return np.full((1, local), tokens * topk / experts)
    drawn = np.random.default_rng(0).random((experts, DRAWS)).T
    power, most = 1.0 - skew, np.log(max(POPULAR_SHARE * tokens, 1.0))
    # with m = e ** most: (1 + (m ** power - 1) * drawn) ** (1 / power), and its limit m ** drawn
    share = np.exp(np.log1p(np.expm1(power * most) * drawn) / power if power else most * drawn)
    loads = np.minimum(share * (tokens * topk / share.sum(1, keepdims=True)), tokens)
    ranks = experts // local
    by_rank = loads[:, : ranks * local].reshape(DRAWS, ranks, local)
    return np.asarray(by_rank[np.arange(DRAWS), by_rank.sum(2).argmax(1)])


def summed(p: Point, counts: Mapping[str, Count]) -> dict[str, Column]:
    """``counts`` summed over the busiest rank's experts: means of draws, a value per row of p.

    ``counts``: functions of (tokens of each expert, all tokens). Equal rows are computed once.
    """
    facts = (p.tokens, p.experts, p.topk, p.local, p.skew)
    rows = np.broadcast_arrays(*(np.asarray(fact, dtype=float) for fact in facts))
    shape = rows[0].shape
    distinct, back = np.unique(np.stack([r.ravel() for r in rows]), axis=1, return_inverse=True)
    found = {name: np.zeros(distinct.shape[1]) for name in counts}
    for i, (tokens, experts, topk, local, skew) in enumerate(distinct.T):
        loads = busiest_loads(tokens, int(experts), topk, int(local), skew)
        for name, count in counts.items():
            found[name][i] = count(loads, tokens).sum(1).mean()
    return {name: values[back.reshape(-1)].reshape(shape) for name, values in found.items()}
