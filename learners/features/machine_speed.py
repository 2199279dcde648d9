"""Corrects times for a shared machine whose speed changes: to the median speed of the sweep.

Beside every measurement two reference workloads (anchors) were timed: a matrix product on all
threads, ``anchor_us``, and a series of views on one thread, ``serial_us``. With

    slowdown_i = anchor_i / median of anchor_i,
    share_1 = time / (time + HALF_PARALLEL_US), share_2 = 1 - share_1,

a corrected time is time * prod_i slowdown_i ** -(share_i * sensitivity_i). The sensitivities of a
family (1: as slow as the anchor, 0: not affected) are learned from points measured twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import pd
from itercast.microbench.ops.family import Family

ANCHORS = ("anchor_us", "serial_us")
HALF_PARALLEL_US = assumed(__file__, "half_parallel_us")
PRIOR_WEIGHT = assumed(__file__, "prior_weight")
MAX_SLOWDOWN = assumed(__file__, "max_slowdown")
Sensitivity = tuple[float, float]  # to anchor_us, to serial_us
PRIOR_SENSITIVITY: Sensitivity = tuple(assumed(__file__, "prior_sensitivity"))
Anchors = Mapping[tuple[str, int], tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Usual times of both anchors by (gpu, threads), in us, and a family's sensitivity to each.

    ``sensitivity`` 1: slows as much as the anchor; 0: not affected.
    """

    anchors: Anchors
    sensitivity: Sensitivity


def _anchor_times(rows: pd.DataFrame) -> np.ndarray:
    """Return the times of both ANCHORS in us, shape (rows, 2); ``anchor_us`` if one is missing."""
    first = rows["anchor_us"].to_numpy(dtype=float)
    second = rows["serial_us"].to_numpy(dtype=float) if "serial_us" in rows else first
    return np.stack([first, np.where(np.isfinite(second), second, first)], axis=1)


def reference_anchors(
    tables: Mapping[str, pd.DataFrame],
) -> dict[tuple[str, int], tuple[float, float]]:
    """Computes how long the reference workloads (anchors) usually take: medians by (gpu, threads).

    In us, over the rows of all families; empty where none was timed.
    """
    parts = [t[[c for c in ("gpu", "threads", *ANCHORS) if c in t]] for t in tables.values()]
    parts = [p for p in parts if "anchor_us" in p]
    if not parts:
        return {}
    rows = pd.concat(parts).dropna(subset="anchor_us")
    rows = rows[["gpu", "threads"]].assign(**dict(zip(ANCHORS, _anchor_times(rows).T, strict=True)))
    medians = rows.groupby(["gpu", "threads"])[list(ANCHORS)].median()
    return {
        (str(gpu), int(threads)): (float(first), float(second))
        for (gpu, threads), (first, second) in zip(medians.index, medians.to_numpy(), strict=True)
    }


def undisturbed(rows: pd.DataFrame, anchors: Anchors) -> pd.DataFrame:
    """Keeps the rows measured while both anchors took at most MAX_SLOWDOWN times their median."""
    rows_kept = np.flatnonzero((log_slowness(rows, anchors) <= np.log(MAX_SLOWDOWN)).all(axis=1))
    return rows.iloc[rows_kept].reset_index(drop=True)


def shares(time_us: np.ndarray) -> np.ndarray:
    """Shares (..., 2) of an op that follow each anchor, parallel and serial; their sum is 1."""
    parallel = time_us / (time_us + HALF_PARALLEL_US)
    return np.stack([parallel, 1 - parallel], axis=-1)


def log_slowness(rows: pd.DataFrame, anchors: Anchors) -> np.ndarray:
    """Return log(anchor / its median on that GPU and number of threads), shape (rows, 2).

    0 where no anchor was timed.
    """
    if "anchor_us" not in rows or not anchors:
        return np.zeros((len(rows), 2))
    keys = zip(rows["gpu"], rows["threads"].fillna(0).astype(int), strict=True)
    unknown = (np.nan, np.nan)
    slow = np.log(_anchor_times(rows) / np.array([anchors.get(k, unknown) for k in keys]))
    return np.asarray(np.nan_to_num(slow))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Points measured twice, second over first measurement.

    ``time``: log ratio of times (points,). ``slow``: log ratio of each anchor, times the share of
    the op that follows this anchor (points, 2).
    """

    time: np.ndarray
    slow: np.ndarray


def retest_pairs(rows: pd.DataFrame, family: Family, anchors: Anchors) -> Pairs:
    """Pair the second measurement of each point with its first."""
    if "repeat" not in rows:
        return Pairs(time=np.zeros(0), slow=np.zeros((0, 2)))
    names = [f.name for f in fields(family.params) if f.name in rows]
    names += [n for n in ("gpu", "threads", "cache") if n in rows]
    slowness = log_slowness(rows, anchors)
    timed = rows[[*names, "repeat"]].assign(
        time=np.log(rows["time_us"].to_numpy(dtype=float)),
        first=slowness[:, 0],
        second=slowness[:, 1],
    )
    once = timed[timed["repeat"] == 0].drop_duplicates(names)
    again = timed[timed["repeat"] == 1].drop_duplicates(names)
    pairs = once.merge(again, on=names)
    changes = [pairs[f"{name}_y"] - pairs[f"{name}_x"] for name in ("time", "first", "second")]
    middle_us = np.exp((pairs["time_x"] + pairs["time_y"]).to_numpy() / 2)
    time, first, second = (change.to_numpy() for change in changes)
    return Pairs(time=time, slow=np.stack([first, second], axis=1) * shares(middle_us))


def learn_speed(rows: pd.DataFrame, family: Family, anchors: Anchors) -> Speed:
    """Learn sensitivities by ridge regression of log time ratios on log anchor ratios.

    Shrunk towards PRIOR_SENSITIVITY and limited to [0, 1.2].
    """
    pairs, prior = retest_pairs(rows, family, anchors), np.array(PRIOR_SENSITIVITY)
    gram = pairs.slow.T @ pairs.slow + PRIOR_WEIGHT * np.eye(2)
    moment = pairs.slow.T @ np.clip(pairs.time, -1, 1) + PRIOR_WEIGHT * prior
    first, second = np.clip(np.linalg.solve(gram, moment), 0.0, 1.2)
    return Speed(anchors=anchors, sensitivity=(float(first), float(second)))


def at_reference_us(rows: pd.DataFrame, speed: Speed) -> np.ndarray:
    """Returns measured times in us, corrected to the machine's usual speed."""
    time_us = rows["time_us"].to_numpy(dtype=float)
    slowness = log_slowness(rows, speed.anchors) * shares(time_us)
    return np.asarray(time_us * np.exp(-slowness @ np.array(speed.sensitivity)))


def retest_ape_pct(rows: pd.DataFrame, family: Family, speed: Speed) -> float | None:
    """Noise floor: median difference in % of two measurements of one point, after correction."""
    pairs = retest_pairs(rows, family, speed.anchors)
    if len(pairs.time) < 2:
        return None
    remaining = np.exp(pairs.time - pairs.slow @ np.array(speed.sensitivity))
    return float(np.median(np.abs(remaining - 1)) * 100)


def iterations_at_reference_us(
    rows: pd.DataFrame,
    anchors: Anchors,
    by_family_us: Mapping[str, float],
    calls: Mapping[str, int],
    sensitivities: Mapping[str, Sensitivity],
) -> Iterator[float]:
    """Corrects measured iteration times to the machine's usual speed; yields them in us.

    How much an iteration slows with the anchors (its sensitivity) is the mean over its op families,
    weighted by their forecast time. All ops of a family count as equally long: the family's time
    over the number of its ``calls``.
    """
    total_us = sum(by_family_us.values())
    weights = np.zeros(2)
    for name, us in by_family_us.items():
        parts = shares(np.array(us / max(1, calls.get(name, 1))))
        weights += us / total_us * parts * np.array(sensitivities.get(name, PRIOR_SENSITIVITY))
    slowness = log_slowness(rows, anchors)
    time_us = rows["time_us"].to_numpy(dtype=float) * np.exp(-slowness @ weights)
    yield from time_us.tolist()
