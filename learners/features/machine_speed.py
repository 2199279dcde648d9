"""Correction for a shared machine that changes speed: times at the sweep's median speed.

Beside every measurement two anchors were timed: a matrix product on all threads, ``anchor_us``, and
a row of views on one, ``serial_us``. Large ops follow the first, small ones the second (``shares``)
and each family to its own degree: a product fully, a copy hardly. How much a family follows them
(its sensitivity) is learned from the points that were measured twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from microbench.ops.family import Family

ANCHORS = ("anchor_us", "serial_us")
SPREAD_US = 100.0  # an op of this length runs half in parallel, as torch splits work
PRIOR_SENSITIVITY = (0.5, 0.75)  # pooled over the families of three sweeps
PRIOR_WEIGHT = 0.5  # in units of squared log anchor ratio: about ten pairs at half speed
DISTURBED = 3.0  # times the median anchor: somebody else had the machine
Sensitivity = tuple[float, float]
Anchors = Mapping[tuple[str, int], tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Reference anchors in us by (gpu, threads), and one family's sensitivity to each anchor."""

    anchors: Anchors
    sensitivity: Sensitivity


def _both(rows: pd.DataFrame) -> np.ndarray:
    """Both anchors by row; the first stands for the second where that was not timed."""
    first = rows["anchor_us"].to_numpy(dtype=float)
    second = rows["serial_us"].to_numpy(dtype=float) if "serial_us" in rows else first
    return np.stack([first, np.where(np.isfinite(second), second, first)], axis=1)


def reference_anchors(
    tables: Mapping[str, pd.DataFrame],
) -> dict[tuple[str, int], tuple[float, float]]:
    """Median anchors in us by (gpu, threads) over all families; empty where none was timed."""
    parts = [t[[c for c in ("gpu", "threads", *ANCHORS) if c in t]] for t in tables.values()]
    parts = [p for p in parts if "anchor_us" in p]
    if not parts:
        return {}
    rows = pd.concat(parts).dropna(subset="anchor_us")
    rows = rows[["gpu", "threads"]].assign(**dict(zip(ANCHORS, _both(rows).T, strict=True)))
    medians = rows.groupby(["gpu", "threads"])[list(ANCHORS)].median()
    return {
        (str(gpu), int(threads)): (float(first), float(second))
        for (gpu, threads), (first, second) in zip(medians.index, medians.to_numpy(), strict=True)
    }


def undisturbed(rows: pd.DataFrame, anchors: Anchors) -> pd.DataFrame:
    """Rows measured while nobody else had most of a shared machine."""
    calm = np.flatnonzero((log_slowness(rows, anchors) <= np.log(DISTURBED)).all(axis=1))
    return rows.iloc[calm].reset_index(drop=True)


def shares(time_us: np.ndarray) -> np.ndarray:
    """How much of an op of that length follows each anchor; the two add up to 1."""
    parallel = time_us / (time_us + SPREAD_US)
    return np.stack([parallel, 1 - parallel], axis=-1)


def log_slowness(rows: pd.DataFrame, anchors: Anchors) -> np.ndarray:
    """log(anchor / reference) per row and anchor; 0 where none was timed."""
    if "anchor_us" not in rows or not anchors:
        return np.zeros((len(rows), 2))
    keys = zip(rows["gpu"], rows["threads"].fillna(0).astype(int), strict=True)
    unknown = (np.nan, np.nan)
    slow = np.log(_both(rows) / np.array([anchors.get(k, unknown) for k in keys]))
    return np.asarray(np.nan_to_num(slow))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Points measured twice: log time ratios, and each anchor's log ratio times its share."""

    time: np.ndarray
    slow: np.ndarray


def retest_pairs(rows: pd.DataFrame, family: Family, anchors: Anchors) -> Pairs:
    """Second against first measurement, in the order of the first."""
    if "repeat" not in rows:
        return Pairs(time=np.zeros(0), slow=np.zeros((0, 2)))
    names = [f.name for f in fields(family.params) if f.name in rows]
    names += [n for n in ("gpu", "threads", "cache") if n in rows]
    slow = log_slowness(rows, anchors)
    timed = rows[[*names, "repeat"]].assign(
        time=np.log(rows["time_us"].to_numpy(dtype=float)), first=slow[:, 0], second=slow[:, 1]
    )
    once = timed[timed["repeat"] == 0].drop_duplicates(names)
    again = timed[timed["repeat"] == 1].drop_duplicates(names)
    both = once.merge(again, on=names)
    change = np.stack([both[f"{c}_y"] - both[f"{c}_x"] for c in ("time", "first", "second")], 1)
    middle_us = np.exp((both["time_x"] + both["time_y"]).to_numpy() / 2)
    return Pairs(time=change[:, 0], slow=change[:, 1:] * shares(middle_us))


def learn_speed(rows: pd.DataFrame, family: Family, anchors: Anchors) -> Speed:
    """Ridge regression of time ratios on anchor ratios towards the prior, within 0 and 1.2."""
    pairs, prior = retest_pairs(rows, family, anchors), np.array(PRIOR_SENSITIVITY)
    square = pairs.slow.T @ pairs.slow + PRIOR_WEIGHT * np.eye(2)
    both = pairs.slow.T @ np.clip(pairs.time, -1, 1) + PRIOR_WEIGHT * prior
    first, second = np.clip(np.linalg.solve(square, both), 0.0, 1.2)
    return Speed(anchors=anchors, sensitivity=(float(first), float(second)))


def at_reference_us(rows: pd.DataFrame, speed: Speed) -> np.ndarray:
    """Measured times in us as they would be at the reference speed."""
    time_us = rows["time_us"].to_numpy(dtype=float)
    slow = log_slowness(rows, speed.anchors) * shares(time_us)
    return np.asarray(time_us * np.exp(-slow @ np.array(speed.sensitivity)))


def retest_ape_pct(rows: pd.DataFrame, family: Family, speed: Speed) -> float | None:
    """Median difference between two measurements of one point far apart: the noise floor."""
    pairs = retest_pairs(rows, family, speed.anchors)
    if len(pairs.time) < 2:
        return None
    left = np.exp(pairs.time - pairs.slow @ np.array(speed.sensitivity))
    return float(np.median(np.abs(left - 1)) * 100)


def iterations_at_reference_us(
    rows: pd.DataFrame,
    anchors: Anchors,
    by_family_us: Mapping[str, float],
    calls: Mapping[str, int],
    sensitivities: Mapping[str, Sensitivity],
) -> Iterator[float]:
    """Measured iterations at reference speed; families weigh by their time in the forecast.

    A family's ops count as of average length: its time over its ``calls``.
    """
    total_us = sum(by_family_us.values())
    weights = np.zeros(2)
    for name, us in by_family_us.items():
        each = shares(np.array(us / max(1, calls.get(name, 1))))
        weights += us / total_us * each * np.array(sensitivities.get(name, PRIOR_SENSITIVITY))
    slow = log_slowness(rows, anchors)
    yield from (float(t) for t in rows["time_us"].to_numpy(dtype=float) * np.exp(-slow @ weights))
