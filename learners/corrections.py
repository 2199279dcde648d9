"""Corrections of what a family's ensemble forecasts, applied one after the other.

Each is a rule that can be switched off by its name (``itercast.microbench.switches``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from itercast.learners.features.table import halved_rate_bound_us
from itercast.learners.transfer import achieved_rate
from itercast.learners.transfer.query_rows import QueryRows
from itercast.learners.transfer.source_gpus import SourceGpus
from itercast.microbench.assumptions import assumed
from itercast.microbench.switches import is_on

BOUND_EXPONENT = assumed(__file__, "bound_exponent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The rows that are forecast, and the measured GPUs whose rows forecast them.

    ``price`` forecasts other rows of the family in us, by the corrections before this one.
    """

    query: QueryRows
    source_gpus: SourceGpus
    price: Callable[[pd.DataFrame], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A rule by its name; ``corrected_us`` takes forecasts in us and returns better ones."""

    name: str
    corrected_us: Callable[[np.ndarray, Asked], np.ndarray]


def corrections_in_use() -> tuple[Correction, ...]:
    """The corrections that are not switched off, in their order."""
    return tuple(correction for correction in CORRECTIONS if is_on(correction.name))


def with_limited_tensor_cores(time_us: np.ndarray, asked: Asked) -> np.ndarray:
    """Softly bounds times below on GPUs whose tensor cores are limited below their full rate.

    (time^p + bound^p)^(1/p), p = BOUND_EXPONENT, bound = ``halved_rate_bound_us``.
    """
    bound_us = halved_rate_bound_us(asked.query.rows, asked.query.family, asked.query.gpus)
    p = BOUND_EXPONENT
    return np.asarray((time_us**p + bound_us**p) ** (1 / p))


def with_achieved_rate(time_us: np.ndarray, asked: Asked) -> np.ndarray:
    """Times that follow the rate of large products that a GPU's file states."""
    factor = achieved_rate.correction(asked.query, asked.source_gpus, asked.price)
    return np.asarray(time_us * factor)


CORRECTIONS = (
    Correction(name="limited_tensor_cores", corrected_us=with_limited_tensor_cores),
    Correction(name="achieved_rate", corrected_us=with_achieved_rate),
)
