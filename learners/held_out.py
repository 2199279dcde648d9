"""Forecasts of the rows that training held out, with what explains a bad one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.capture.base.files import write_atomic
from itercast.learners.family_model import Learned, Prepared
from itercast.learners.features.table import columns, is_number
from itercast.learners.transfer.offsets import Offsets
from itercast.microbench.ops.family import Family, parameter_types

FILE = "held_out.parquet"  # in a bundle's folder
FORMATS = {int: ".0f", float: ".10g"}  # of a parameter, by its type
CONDITIONS = ("gpu", "threads", "cache")  # of a measurement, beside the op's parameters


def held_out_forecasts(
    learned: Learned,
    rows: pd.DataFrame,
    family: Family,
    train: np.ndarray,
    test: np.ndarray,
    forecast_us: np.ndarray,
    offsets: Offsets,
) -> pd.DataFrame:
    """A row per held-out row (index in ``test``): measured and forecast time, and what may explain
    it.

    ``measured_us`` is at the machine's reference speed. ``outside``: the first feature beyond the
    values of the rows ``train``, empty where all are within. ``neighbour_log2``: distance in log2
    of sizes to the nearest of them of the same kind, infinite where there is none. ``spread_pct``:
    20 to 80 % quantile of the samples; ``retest_pct``: difference of two measurements, or NaN.
    """
    prepared, tested = learned.prepared, rows.iloc[test]
    p10_offset, p90_offset = offsets
    table = pd.DataFrame(
        {
            "family": family.name,
            "op": tested["op"].to_numpy(),
            "gpu": tested["gpu"].to_numpy(),
            "dtype": tested["dtype"].to_numpy(),
            "params": params_texts(tested, family),
            "bytes_moved": np.broadcast_to(
                family.bytes_moved(columns(tested, family)), len(tested)
            ),
            "measured_us": prepared.table.time_us[test],
            "predicted_us": forecast_us,
            "predicted_us_p10": forecast_us * np.exp(p10_offset),
            "predicted_us_p90": forecast_us * np.exp(p90_offset),
            "roofline_us": prepared.table.roofline_us[test],
            "outside": _outside(prepared, train, test),
            "neighbour_log2": _neighbour_log2(prepared, train, test),
            "spread_pct": _spread_pct(tested),
            "retest_pct": _retest_pct(prepared, rows, family)[test],
        }
    )
    for name in ("threads", "cache", "stack"):
        if name in tested:
            table[name] = tested[name].to_numpy()
    return table


def _spread_pct(rows: pd.DataFrame) -> np.ndarray:
    """How far a measurement's samples spread: (80 % quantile - 20 % quantile) / median, in %."""
    p20, p80 = (rows.get(f"time_us_{q}", rows["time_us"] * np.nan) for q in ("p20", "p80"))
    return (100 * (p80 - p20) / rows["time_us"]).to_numpy(dtype=float)


def params_texts(rows: pd.DataFrame, family: Family) -> list[str]:
    """Parameters of each row that are not their defaults, as text: ``m=2 n=3 k=4``.

    Without op and dtype, which have columns of their own.
    """
    params, pairs_by_field = columns(rows, family), list[list[str]]()
    types = parameter_types(family.params)
    for f in fields(family.params):
        if f.name not in ("op", "dtype"):
            values = np.broadcast_to(getattr(params, f.name), len(rows)).tolist()
            texts = [format(v, FORMATS.get(types[f.name], "")) for v in values]
            pairs = zip(values, texts, strict=True)
            pairs_by_field.append([f"{f.name}={t}" if v != f.default else "" for v, t in pairs])
    of_rows = zip(*pairs_by_field, strict=True)
    return [" ".join(filter(None, pairs)) for pairs in of_rows] or [""] * len(rows)


def _outside(prepared: Prepared, train: np.ndarray, test: np.ndarray) -> list[str]:
    """The first feature of each held-out row that lies beyond those of the known rows."""
    outside = [""] * len(test)
    for name, values in prepared.features.items():
        if is_number(values):
            values = np.asarray(values, dtype=float)
            low, high = values[train].min(), values[train].max()
            beyond = (values[test] < low) | (values[test] > high)
        else:
            beyond = ~np.isin(values[test], np.unique(values[train]))
        for i in np.flatnonzero(beyond):
            outside[i] = outside[i] or name
    return outside


def rows_by_kind(kind: np.ndarray) -> dict[str, np.ndarray]:
    """Row indices of each kind."""
    codes, names = pd.factorize(kind)
    order, ends = np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))
    return dict(zip(names, np.split(order, ends), strict=False))  # the last piece is empty


def _neighbour_log2(prepared: Prepared, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Euclidean distance in log2 sizes to the nearest known row of the same kind."""
    from scipy.spatial import cKDTree  # lazy: 0.2 s

    distance = np.full(len(test), np.inf)
    train_of_kind = rows_by_kind(prepared.kind[train])
    for kind, of_kind in rows_by_kind(prepared.kind[test]).items():
        if kind in train_of_kind:
            tree = cKDTree(prepared.at[train[train_of_kind[kind]]])
            distance[of_kind] = tree.query(prepared.at[test[of_kind]])[0]
    return distance


def _retest_pct(prepared: Prepared, rows: pd.DataFrame, family: Family) -> np.ndarray:
    """Difference in % of the longest and shortest measurement of a point; NaN if measured once."""
    names = [f.name for f in fields(family.params) if f.name in rows]
    names += [n for n in CONDITIONS if n in rows and n not in names]
    same = rows.assign(_us=prepared.table.time_us).groupby(names, dropna=False, sort=False)["_us"]
    ratio = same.transform("max") / same.transform("min")
    return np.where(same.transform("size") > 1, 100 * (ratio - 1), np.nan)


def log_errors(held_out: pd.DataFrame) -> pd.Series[float]:
    """Mean log(measured / forecast) of each held-out point."""
    names = [n for n in ("op", "gpu", "dtype", "params", "threads", "cache") if n in held_out]
    ratio = held_out["measured_us"] / held_out["predicted_us"]
    error = pd.Series(np.log(ratio.to_numpy()), index=held_out.index)
    return error.groupby([held_out[n].astype(str) for n in names]).mean()


def shapes_of(errors: pd.DataFrame) -> np.ndarray:
    """The shape of each point of joined ``log_errors``: its op's parameters without op and dtype.

    Points of one shape (other dtypes, caches, numbers of threads) err alike.
    """
    return errors.index.get_level_values("params").to_numpy()


def median_retest_pct(*tables: pd.DataFrame) -> float | None:
    """Median ``retest_pct`` of the points of held-out tables; None if all were measured once."""
    parts = [t["retest_pct"].dropna() for t in tables if "retest_pct" in t]
    twice = pd.concat(parts) if parts else pd.Series(dtype=float)
    return float(twice.median()) if len(twice) else None


def save_held_out(folder: Path, held_out: pd.DataFrame) -> None:
    """Write held-out forecasts into a bundle's folder."""
    write_atomic(folder / FILE, held_out.to_parquet(index=False, compression="zstd"))


def load_held_out(folder: Path) -> pd.DataFrame:
    """Read held-out forecasts of a bundle; empty where it has none."""
    path = folder / FILE
    return pd.read_parquet(path) if path.is_file() else pd.DataFrame()


def with_others(held_out: pd.DataFrame, before: pd.DataFrame) -> pd.DataFrame:
    """Held-out forecasts, joined with those in the table ``before`` for other families."""
    if before.empty:
        return held_out
    others = before[~before["family"].isin(held_out["family"])]
    return pd.concat([others, held_out], ignore_index=True)


def has_held_out(folder: Path) -> bool:
    """Whether a folder holds a bundle and its held-out forecasts."""
    return (folder / "bundle.json").is_file() and (folder / FILE).is_file()
