"""The spread of a step over ranks that are noisy: a synchronous step is that of the slowest rank.

What a rank does itself (its kernels, and host time that they wait for) takes e**(sigma * x) times
the forecast, with x standard normal: it is lognormal, with the forecast as median. x is drawn once
per rank and step, so the same rank is late at each message of the step, and independently of other
ranks. All ranks of a plan wait for each other in each step, whether they are replicas, tensor,
context or expert parallel ranks or pipeline stages: P(slowest of n <= t) = P(one <= t)**n. Messages
and the pipeline's bubble take as long as forecast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, expm1, log
from statistics import NormalDist, fmean

from itercast.capture.base.assumptions import assumed
from itercast.compose.forecast import Forecast
from itercast.compose.target import Target

SIGMA: Mapping[str, float] = assumed(__file__, "sigma")
SHARES = 1000  # equal shares of all steps; their middles give the mean within 1e-4 of a step
RANKS = (1, 8, 64, 512, 4096, 32768)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The distribution of a step that waits for the slowest of its ranks.

    ``sigma``: standard deviation of the log of what a rank does itself, ``own_us`` of the forecast.
    ``mean_us_by_ranks``: the mean if other numbers of ranks did the same work each.
    """

    sigma: float
    ranks: int
    own_us: float
    median_us: float
    p10_us: float
    p90_us: float
    mean_us: float
    mean_us_by_ranks: dict[int, float]

    @property
    def in_words(self) -> str:
        """How long steps take that wait for the slowest rank, in one line."""
        median, low, high, mean = (
            f"{us * 1e-3:.2f}" for us in (self.median_us, self.p10_us, self.p90_us, self.mean_us)
        )
        return f"median {median} ms, 80 % of steps {low} to {high}, mean {mean}"


def spread_of(found: Forecast, target: Target) -> Spread:
    """The spread of a forecast's step where its ranks are as noisy as such devices are."""
    return step_spread(found, SIGMA["cpu" if target.gpu.kind == "cpu" else "gpu"])


def slowest_deviate(share: float, ranks: int) -> float:
    """The ``share`` quantile of the largest of ``ranks`` standard normal numbers.

    By symmetry of the tail above it, 1 - share**(1 / ranks), which is exact for many ranks.
    """
    return -NormalDist().inv_cdf(-expm1(log(share) / ranks))


def mean_slowdown(sigma: float, ranks: int) -> float:
    """The mean of the largest of ``ranks`` lognormal numbers of median 1."""
    middles = ((i + 0.5) / SHARES for i in range(SHARES))
    return fmean(exp(sigma * slowest_deviate(share, ranks)) for share in middles)


def step_spread(found: Forecast, sigma: float) -> Spread:
    """The spread of a forecast's step over its ranks."""
    own_us = found.compute_us + found.idle_by_us.get("host", 0.0)

    def quantile_us(share: float) -> float:
        return found.iteration_us + own_us * expm1(sigma * slowest_deviate(share, found.world_size))

    def mean_us(ranks: int) -> float:
        return found.iteration_us + own_us * (mean_slowdown(sigma, ranks) - 1)

    return Spread(
        sigma=sigma,
        ranks=found.world_size,
        own_us=own_us,
        median_us=quantile_us(0.5),
        p10_us=quantile_us(0.1),
        p90_us=quantile_us(0.9),
        mean_us=mean_us(found.world_size),
        mean_us_by_ranks={ranks: mean_us(ranks) for ranks in RANKS},
    )
