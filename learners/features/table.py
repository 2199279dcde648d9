"""From measured rows to a numeric table: features, roofline, shape groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from microbench.hardware.spec import Gpu
from microbench.ops.family import Family

LAUNCH_FLOOR_US = {"cpu": 1.0, "gpu": 2.0}
SMALL_US = 5.0  # roofline of ops of which mostly the launch is measured
FEW_SMALL = 5
PLACE = " over "  # a GPU over a cluster
ROOFLINE = "roofline"  # beside the features while they are made
Features = dict[str, np.ndarray]  # a column per feature: numbers, or strings as objects
IDENTITY = ("gpu", "stack", "place")  # whose row it is, not what the op is: hidden from new GPUs


def columns(rows: pd.DataFrame, family: Family) -> SimpleNamespace:
    """The family's parameters as arrays; a column that is missing takes the field's default."""
    found: dict[str, Any] = {}
    for f in fields(family.params):
        if f.name in rows:
            values = rows[f.name]
            if f.default is not MISSING and values.hasnans:
                values = values.where(values.notna(), f.default)
            text = isinstance(values.iloc[0], str) if len(values) else False
            if text and f.type in ("int", "float"):
                first = str(values.iloc[0])[:40]
                raise ValueError(f"family {family.name}: column {f.name!r}: {first!r} is no number")
            found[f.name] = values.to_numpy(dtype=object if text else None)
        elif f.default is not MISSING:
            found[f.name] = broadcast(f.default, len(rows))
        else:
            raise ValueError(f"family {family.name}: rows lack the column {f.name!r}")
    return SimpleNamespace(**found)


def broadcast(values: Any, count: int) -> np.ndarray:
    """One value per row; text as objects, which numpy compares as Python does."""
    array = np.broadcast_to(np.asarray(values), count)
    return array.astype(object) if array.dtype.kind == "U" else array


def by_value(
    values: np.ndarray, answers: Mapping[Any, Any], other: Any, dtype: Any = object
) -> np.ndarray:
    """The answer to each row's value, ``other`` where there is none."""
    codes, distinct = pd.factorize(values)
    found = [answers.get(value, other) for value in distinct]
    return np.array([*found, other], dtype=dtype)[codes]  # a missing value has the code -1


def among(values: np.ndarray, seen: Iterable[str]) -> np.ndarray:
    """Which of the strings are among those seen."""
    return by_value(values, dict.fromkeys(seen, True), False, bool)


def bounds_us(family: Family, p: Any, gpu: Gpu, threads: Any) -> tuple[Any, Any]:
    """flops / full rate and bytes / bandwidth, in us.

    On a CPU rates shrink with the share of cores used; bandwidth not below one half.
    """
    share = np.clip(np.asarray(threads, dtype=float) / gpu.sm_count, 1 / gpu.sm_count, 1.0)
    share = share if gpu.kind == "cpu" else np.ones_like(share)
    rates = _rates(p, gpu.full_rate)
    if family.rate is not None:
        rates = np.minimum(rates, family.rate(p, gpu))
    compute_s = np.asarray(family.flops(p), dtype=float) / (rates * share)
    memory_s = np.asarray(family.bytes_moved(p), dtype=float)
    memory_s = memory_s / (gpu.hbm_bytes_per_s * np.maximum(share, 0.5))
    return compute_s * 1e6, memory_s * 1e6


def _rates(p: Any, rate: Callable[[str], float]) -> np.ndarray:
    """FLOP/s of each row's dtype."""
    codes, names = pd.factorize(np.asarray(p.dtype, dtype=object))
    return np.array([rate(str(name)) for name in names])[codes]


def at_least_us(rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]) -> np.ndarray:
    """The time at the peak, where a GPU's peak is a halved rate; else 0."""
    found = np.zeros(len(rows))
    for name in rows["gpu"].unique():
        if gpus[name].full_rate_flops_per_s:
            mine = (rows["gpu"] == name).to_numpy()
            p = columns(rows[mine], family)
            found[mine] = 1e6 * np.asarray(family.flops(p), float) / _rates(p, gpus[name].peak)
    return found


def roofline_us(family: Family, p: Any, gpu: Gpu, threads: Any) -> Any:
    """The larger bound plus a launch floor, or what the family says instead, in us."""
    if family.floor_us is not None:
        return np.asarray(family.floor_us(p, gpu), dtype=float)
    return np.maximum(*bounds_us(family, p, gpu, threads)) + LAUNCH_FLOOR_US[gpu.kind]


def with_launch(rows: pd.DataFrame) -> np.ndarray:
    """Which rows were timed from the host, launch included."""
    if "timer" not in rows:
        return np.zeros(len(rows), dtype=bool)
    return (rows["timer"] == "with_launch").to_numpy(dtype=bool)


def learn_launch_us(
    rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]
) -> dict[str, float]:
    """Host launch in us by GPU: what the smallest ops timed from the host took longer (1 %).

    A GPU of whose rows too few are small takes the least of the others: of large ops the rest over
    the roofline is no launch. Nor is what family ``host`` takes: there the call is the op.
    """
    if family.name == "host":
        return {}
    timed = rows[with_launch(rows)]
    found, without = {}, []
    for gpu, part in timed.groupby("gpu"):
        p = columns(part, family)
        roof = roofline_us(family, p, gpus[str(gpu)], np.zeros(len(part)))
        small = roof <= SMALL_US
        rest = part["time_us"].to_numpy(dtype=float)[small] - roof[small]
        if small.sum() < FEW_SMALL:
            without.append(str(gpu))
        else:
            found[str(gpu)] = max(0.0, float(np.quantile(rest, 0.01)))
    return {**found, **dict.fromkeys(without, min(found.values(), default=0.0))}


def launch_us(rows: pd.DataFrame, known: Mapping[str, float]) -> np.ndarray:
    """Launch in us to add to each row's roofline; an unknown GPU takes the median one."""
    timed = with_launch(rows)
    if not timed.any():
        return np.zeros(len(rows))
    typical = float(np.median(list(known.values()))) if known else 0.0
    gpu = rows["gpu"].to_numpy(dtype=object)
    return np.where(timed, by_value(gpu, known, typical, float), 0.0)


def identities(rows: pd.DataFrame, family: Family, stacks: Mapping[str, str]) -> Features:
    """GPU over its place, software and place of each row; ``stack`` is else its GPU's usual one."""
    gpu = rows["gpu"].to_numpy(dtype=object)
    stack = by_value(gpu, stacks, "")
    if "stack" in rows:
        stack = rows["stack"].where(rows["stack"].notna(), stack).to_numpy(dtype=object)
    place = np.full(len(rows), "", dtype=object)
    if family.place is not None:
        place = broadcast(family.place(columns(rows, family)), len(rows))
        gpu = gpu + np.where(place == "", "", PLACE + place)
    return {"gpu": gpu, "stack": stack, "place": place}


def ordinary(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows measured one call at a time; not those of a GPU kept busy for seconds (``load``).

    Under load the clocks sink as far as the power limit asks for: another condition, told apart.
    """
    return rows[rows["load"].isna()] if "load" in rows else rows


def usual_stacks(rows: pd.DataFrame) -> dict[str, str]:
    """The software most rows of each GPU were measured with."""
    if "stack" not in rows:
        return {}
    known = rows.dropna(subset=["stack"]).groupby("gpu")["stack"]
    return {str(gpu): str(stacks.mode().iloc[0]) for gpu, stacks in known}


def feature_table(
    rows: pd.DataFrame,
    family: Family,
    gpus: Mapping[str, Gpu],
    launch: Mapping[str, float] | None = None,
) -> tuple[Features, np.ndarray]:
    """Features (numbers and strings) and the roofline in us, in the order of the rows."""
    codes, names = pd.factorize(rows["gpu"].to_numpy(dtype=object), use_na_sentinel=False)
    pieces, places = [], []
    for code, name in enumerate(names):
        if name not in gpus:
            raise ValueError(f"unknown gpu {name!r}; the bundle knows {sorted(gpus)}")
        places.append(np.flatnonzero(codes == code))
        part = rows if len(names) == 1 else rows.iloc[places[-1]]
        pieces.append(_features_on(part, family, gpus[name], launch or {}))
    found = pieces[0]
    if len(pieces) > 1:
        back = np.argsort(np.concatenate(places))
        found = {name: np.concatenate([p[name] for p in pieces])[back] for name in pieces[0]}
    return found, found.pop(ROOFLINE)


def _features_on(
    rows: pd.DataFrame, family: Family, gpu: Gpu, launch: Mapping[str, float]
) -> Features:
    """Features of rows of one GPU, and under ``ROOFLINE`` their roofline."""
    p, count = columns(rows, family), len(rows)
    threads = broadcast(float(gpu.sm_count if gpu.kind == "cpu" else 0), count)
    if "threads" in rows:
        stated = rows["threads"].to_numpy(dtype=float)
        threads = np.where(np.isnan(stated), threads, stated)
    cold = np.zeros(count)
    if "cache" in rows:
        cold = (rows["cache"].to_numpy(dtype=object) == "cold").astype(float)
    flops = np.asarray(family.flops(p), dtype=float)
    moved = np.asarray(family.bytes_moved(p), dtype=float)
    roof = roofline_us(family, p, gpu, threads)
    if gpu.kind != "cpu":  # on a CPU the call is the op
        roof = roof + launch_us(rows, launch)
    compute_us, memory_us = bounds_us(family, p, gpu, threads)
    common = {
        "threads": threads,
        "cold": cold,
        "log_flops": np.log2(flops + 1),
        "log_bytes": np.log2(moved + 1),
        "log_cache_fill": np.log2((moved + 1) / gpu.l2_bytes),
        "intensity": np.log2((flops + 1) / (moved + 1)),
        "log_roofline": np.log2(roof),
        "log_bound": np.log2((compute_us + 1e-3) / (memory_us + 1e-3)),
    }
    found = {**family.features(p, gpu), **common, ROOFLINE: roof}
    return {name: broadcast(values, count) for name, values in found.items()}


def shape_groups(rows: pd.DataFrame, family: Family) -> np.ndarray:
    """A number per shape: parameters without dtype, and no conditions of measurement.

    An event of the host that comes in one shape has none to leave out: its measurements count as
    shapes.
    """
    p = columns(rows, family)
    names = [f.name for f in fields(family.params) if f.name != "dtype"]
    frame = pd.DataFrame({n: getattr(p, n) for n in names})
    if "trial" in frame:
        single = frame.groupby("op")["tensors"].transform("nunique") == 1
        frame["trial"] = np.where(single, -1 - np.arange(len(frame)), frame["trial"])
    return frame.groupby(names, sort=False, dropna=False).ngroup().to_numpy()


class Encoder:
    """Strings to one-hot columns with the vocabulary of the training rows."""

    def __init__(self, names: list[str], vocabulary: dict[str, list[str]]) -> None:
        self.names = names
        self.vocabulary = vocabulary

    @classmethod
    def fit(cls, table: Features) -> Encoder:
        """Every string column becomes one column per value seen."""
        texts = [name for name, values in table.items() if not is_number(values)]
        return cls(list(table), {name: sorted(pd.unique(table[name])) for name in texts})

    def encode(self, table: Features) -> np.ndarray:
        """float32, one row per row; unknown strings are all zeros."""
        parts = []
        for name in self.names:
            values, seen = table[name], self.vocabulary.get(name)
            if seen is None:
                parts.append(values.astype(np.float32)[:, None])
            else:
                which = by_value(values, {value: i for i, value in enumerate(seen)}, -1, int)
                parts.append((which[:, None] == np.arange(len(seen))).astype(np.float32))
        return np.hstack(parts)

    def places(self, chosen: list[str]) -> tuple[int, ...]:
        """Positions of the encoded columns of these features; ``name=value``: of one value's."""
        found: list[int] = []
        at = 0
        for name in self.names:
            columns = [f"{name}={value}" for value in self.vocabulary.get(name, [""])]
            found += (at + i for i, one in enumerate(columns) if name in chosen or one in chosen)
            at += len(columns)
        return tuple(found)


def in_envelope(
    table: Features, envelope: Mapping[str, tuple[float, float]], encoder: Encoder
) -> np.ndarray:
    """True where every number lies within the training range and every string was seen.

    A GPU's places are not asked for: what all clusters share forecasts one never seen.
    """
    inside = np.ones(len(table["gpu"]), dtype=bool)
    for name, (low, high) in envelope.items():
        inside &= (table[name] >= low - 1e-6) & (table[name] <= high + 1e-6)
    for name, seen in encoder.vocabulary.items():
        if name == "gpu":
            known = {value.partition(PLACE)[0] for value in seen}
            codes, distinct = pd.factorize(table[name])
            inside &= np.array([str(v).partition(PLACE)[0] in known for v in distinct])[codes]
        elif name not in IDENTITY:
            inside &= among(table[name], seen)
    return inside


def is_number(values: np.ndarray) -> bool:
    """Whether a column holds numbers."""
    return values.dtype.kind in "biuf"
