"""Errors of op forecasts on held-out rows: by group, and the worst of them with a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import pandas as pd

from itercast.eval.results import RETEST, records
from itercast.learners.train import errors
from itercast.microbench.ops import families
from itercast.microbench.store import Facts

KIND_NAMES = {
    "matrix": "matrix products",
    "memory": "memory-bound ops",
    "lookup": "lookups",
    "step": "optimizer, host, messages",
}
SIZES = {  # upper limits in bytes moved
    "up to 4 KiB": 2**12,
    "4 to 64 KiB": 2**16,
    "64 KiB to 1 MiB": 2**20,
    "1 to 16 MiB": 2**24,
    "more than 16 MiB": np.inf,
}
Groups = Mapping[str, Mapping[str, float]]  # errors in % by name, and ``rows``
MIN_ROWS = 3  # of a group; smaller ones are left out
FAR_LOG2 = 2.0  # a neighbour at four times the size counts as far
NOISY_SHARE = 0.5  # a measurement counts as noisy if its noise is this share of the error


@cache
def _kinds() -> Mapping[str, str]:
    """What kind of op each family is, in words: its folder in microbench/ops."""
    rooms = {name: f.params.__module__.split(".")[-2] for name, f in families().items()}
    return {name: KIND_NAMES.get(room, room) for name, room in rooms.items()}


def kinds(ops: pd.DataFrame) -> np.ndarray:
    """What kind of op each row is: one of KIND_NAMES."""
    return np.array([_kinds().get(name, name) for name in ops["family"]], dtype=object)


def sizes(ops: pd.DataFrame) -> np.ndarray:
    """Each row's group by the bytes that its op moves; empty where it moves none."""
    moved = ops["bytes_moved"].to_numpy(dtype=float)
    at = np.searchsorted(list(SIZES.values()), moved)
    return np.where(moved > 0, np.array(list(SIZES), dtype=object)[at], "")


def scores(rows: pd.DataFrame) -> dict[str, float]:
    """Errors in % of some rows, how many they are, and the median retest error if there is one."""
    found = errors(rows["predicted_us"].to_numpy(), rows["measured_us"].to_numpy())
    twice = rows["retest_pct"].dropna()
    return {**found, "rows": len(rows), **({RETEST: float(twice.median())} if len(twice) else {})}


def by_family(ops: pd.DataFrame, fit: Facts) -> Groups:
    """Errors of each family, the largest median first.

    Retest errors are those of all rows of the family where ``fit`` states them.
    """
    found = {str(name): scores(rows) for name, rows in ops.groupby("family")}
    for name in found.keys() & fit.keys():
        found[name].pop(RETEST, None)
        if (floor := fit[name]["retest_ape_pct"]) is not None:
            found[name][RETEST] = floor
    return dict(sorted(found.items(), key=lambda item: -item[1]["median_ape_pct"]))


def by_condition(ops: pd.DataFrame) -> Groups:
    """Errors by size, dtype, GPU, threads and state of the caches; small groups are left out."""
    labels: dict[str, tuple[np.ndarray, Sequence[str]]] = {"size": (sizes(ops), list(SIZES))}
    for column in ("dtype", "gpu", "threads", "cache"):
        if column in ops:
            values = ops[column].astype(str).to_numpy(dtype=object)
            labels[column] = (values, sorted(set(values)))
    return {
        f"{dimension}: {name}": scores(ops[values == name])
        for dimension, (values, names) in labels.items()
        for name in names
        if (values == name).sum() >= MIN_ROWS
    }


def reason(row: Facts) -> str:
    """Why one forecast may be off: extrapolation, nothing measured nearby, noise, or neither."""
    reasons = []
    if row["outside"]:
        reasons.append(f"out of envelope: {row['outside']} beyond the rows learned from")
    error_pct = abs(100 * (float(row["predicted_us"]) / float(row["measured_us"]) - 1))
    doublings = float(row["neighbour_log2"])
    if doublings > FAR_LOG2:
        distance = (
            f"the nearest is {doublings:.1f} doublings away" if np.isfinite(doublings) else "no row"
        )
        reasons.append(f"no similar size was measured: {distance}")
    noise = {"two timings": row["retest_pct"], "samples": row["spread_pct"]}
    for what, pct in noise.items():
        if float(pct) >= NOISY_SHARE * error_pct:
            reasons.append(f"noisy measurement: {what} differ by {pct:.0f} %")
            break
    return "; ".join(reasons) or "none of these: the model misses it"


def off_log(ops: pd.DataFrame) -> np.ndarray:
    """By how much each forecast is off, as the absolute logarithm of predicted / measured."""
    ratio = ops["predicted_us"].to_numpy() / ops["measured_us"].to_numpy()
    return np.asarray(np.abs(np.log(ratio)))


def worst(ops: pd.DataFrame, count: int) -> pd.DataFrame:
    """The ops whose forecasts are off by the largest factor, with ``error_pct`` and ``reason``.

    Of one op measured under several conditions only the worst.
    """
    ranked = ops.iloc[np.argsort(-off_log(ops), kind="stable")]
    found = ranked.drop_duplicates(["family", "op", "dtype", "params"]).head(count)
    error_pct = 100 * (found["predicted_us"] / found["measured_us"] - 1)
    reasons = [reason(row) for row in records(found)]
    return found.assign(error_pct=error_pct, reason=reasons)
