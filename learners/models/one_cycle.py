"""Adam whose rate rises and falls once, as torch's ``OneCycleLR`` has it by default.

torch's optimizers import its compiler, which takes longer than most fits of a model; the function
that they call does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from itercast.capture.base.slow_imports import torch

FIRST, LAST = 1 / 25, 1 / 25e4  # rates of the first and the last step, as shares of the highest
MAX_BETA, MIN_BETA = 0.95, 0.85  # beta1 at both ends, and where the rate is highest


class Adam:
    """Changes ``weights`` by their gradients, in ``steps`` steps; the highest rate is ``rate``.

    ``rising``: the share of the steps before it. AdamW with a ``decay``. Weights and gradients are
    contiguous, as the fused kernel takes them.
    """

    def __init__(
        self, weights: Sequence[Any], rate: float, steps: int, rising: float, decay: float = 0.0
    ) -> None:
        self._weights, self._decay = [*weights], decay
        self._means, self._squares = ([torch.zeros_like(w) for w in weights] for _ in range(2))
        self._done = [torch.zeros(()) for _ in weights]
        self._cycle = ((share * rate, beta) for share, beta in _cycle(steps, rising))

    def step(self) -> None:
        """One step; the gradients are gone after it."""
        from torch.optim.adam import adam

        rate, beta = next(self._cycle)
        with torch.no_grad():
            adam(
                self._weights,
                [weight.grad for weight in self._weights],
                self._means,
                self._squares,
                [],
                self._done,
                fused=True,
                decoupled_weight_decay=True,
                amsgrad=False,
                beta1=beta,
                beta2=0.999,
                lr=rate,
                weight_decay=self._decay,
                eps=1e-8,
                maximize=False,
            )
        for weight in self._weights:
            weight.grad = None


def _cycle(steps: int, rising: float) -> Iterator[tuple[float, float]]:
    """Each step's rate as a share of the highest, and its beta1.

    Both go from their first to their middle value, then to their last, along half a cosine each.
    """
    turn, end = rising * steps - 1, steps - 1

    def between(first: float, last: float, part: float) -> float:
        return last + (first - last) * (1 + math.cos(math.pi * part)) / 2

    for i in range(steps):
        if i <= turn:
            yield between(FIRST, 1.0, i / turn), between(MAX_BETA, MIN_BETA, i / turn)
        else:
            part = (i - turn) / (end - turn)
            yield between(1.0, LAST, part), between(MIN_BETA, MAX_BETA, part)
