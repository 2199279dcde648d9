"""Correction for a shared machine that changes speed: times at the sweep's median anchor.

Beside every measurement an anchor (a small matrix product) was timed. Ops follow it to different
degrees: a product fully, a copy hardly. How much a family follows (its sensitivity) is learned from
the points that were measured twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from microbench.ops.family import Family

PRIOR_SENSITIVITY = 0.7
PRIOR_WEIGHT = 0.5  # in units of squared log anchor ratio: about ten pairs at half speed
Anchors = Mapping[tuple[str, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Reference anchors in us by (gpu, threads), and one family's sensitivity."""

    anchors: Anchors
    sensitivity: float


def reference_anchors(tables: Mapping[str, pd.DataFrame]) -> dict[tuple[str, int], float]:
    """Median anchor in us by (gpu, threads) over all families; empty where none was timed."""
    parts = [t[["gpu", "threads", "anchor_us"]] for t in tables.values() if "anchor_us" in t]
    if not parts:
        return {}
    rows = pd.concat(parts).dropna()
    medians = rows.groupby(["gpu", "threads"])["anchor_us"].median()
    return {(str(key[0]), int(key[1])): float(us) for key, us in medians.items()}  # type: ignore[index]


def log_slowness(rows: pd.DataFrame, anchors: Anchors) -> np.ndarray:
    """log(anchor / reference) per row; 0 where no anchor was timed."""
    if "anchor_us" not in rows or not anchors:
        return np.zeros(len(rows))
    keys = zip(rows["gpu"], rows["threads"].fillna(0).astype(int), strict=True)
    reference = np.array([anchors.get(k, np.nan) for k in keys])
    slow = np.log(rows["anchor_us"].to_numpy(dtype=float) / reference)
    return np.asarray(np.nan_to_num(slow))


def retest_pairs(rows: pd.DataFrame, family: Family, anchors: Anchors) -> pd.DataFrame:
    """Points measured twice: log time ratio ``time`` and log anchor ratio ``slow`` of each."""
    if "repeat" not in rows:
        return pd.DataFrame({"time": [], "slow": []})
    names = [f.name for f in fields(family.params) if f.name in rows]
    names += [n for n in ("gpu", "threads", "cache") if n in rows]
    timed = rows[[*names, "repeat"]].assign(
        time=np.log(rows["time_us"].to_numpy(dtype=float)), slow=log_slowness(rows, anchors)
    )
    first = timed[timed["repeat"] == 0].drop_duplicates(names)
    again = timed[timed["repeat"] == 1].drop_duplicates(names)
    both = first.merge(again, on=names)
    return pd.DataFrame(
        {"time": both["time_y"] - both["time_x"], "slow": both["slow_y"] - both["slow_x"]}
    )


def learn_speed(rows: pd.DataFrame, family: Family, anchors: Anchors) -> Speed:
    """Ridge regression through the origin of time ratios on anchor ratios, within 0 and 1.2."""
    pairs = retest_pairs(rows, family, anchors)
    slow, time = pairs["slow"].to_numpy(dtype=float), pairs["time"].to_numpy(dtype=float)
    both = float((slow * np.clip(time, -1, 1)).sum()) + PRIOR_WEIGHT * PRIOR_SENSITIVITY
    slope = both / (float((slow**2).sum()) + PRIOR_WEIGHT)
    return Speed(anchors=anchors, sensitivity=min(1.2, max(0.0, slope)))


def at_reference_us(rows: pd.DataFrame, speed: Speed) -> np.ndarray:
    """Measured times in us as they would be at the reference speed."""
    slow = log_slowness(rows, speed.anchors)
    return rows["time_us"].to_numpy(dtype=float) * np.exp(-speed.sensitivity * slow)


def retest_ape_pct(rows: pd.DataFrame, family: Family, speed: Speed) -> float | None:
    """Median difference between two measurements of one point far apart: the noise floor."""
    pairs = retest_pairs(rows, family, speed.anchors)
    if len(pairs) < 2:
        return None
    left = np.exp(pairs["time"] - speed.sensitivity * pairs["slow"])
    return float(np.median(np.abs(left - 1)) * 100)


def iteration_at_reference_us(
    time_us: float,
    anchor_us: float,
    reference_us: float | None,
    by_family_us: Mapping[str, float],
    sensitivities: Mapping[str, float],
) -> float:
    """A measured iteration at reference speed; its families' sensitivities weigh by their time."""
    total = sum(by_family_us.values())
    if reference_us is None or not anchor_us > 0 or not total:
        return time_us
    weighed = sum(
        us * sensitivities.get(name, PRIOR_SENSITIVITY) for name, us in by_family_us.items()
    )
    return time_us * float((reference_us / anchor_us) ** (weighed / total))
