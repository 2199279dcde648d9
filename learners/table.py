"""From measured rows to a numeric table: features, roofline, shape groups."""

from __future__ import annotations

from collections.abc import Mapping
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
IDENTITY = ("gpu", "stack", "place")  # whose row it is, not what the op is: hidden from new GPUs


def columns(rows: pd.DataFrame, family: Family) -> SimpleNamespace:
    """The family's parameters as arrays; a column that is missing takes the field's default."""
    found: dict[str, Any] = {}
    for f in fields(family.params):
        if f.name in rows:
            values = rows[f.name]
            if f.default is not MISSING:
                values = values.where(values.notna(), f.default)
        elif f.default is not MISSING:
            values = pd.Series([f.default] * len(rows))
        else:
            raise ValueError(f"family {family.name}: rows lack the column {f.name!r}")
        text = isinstance(values.iloc[0], str) if len(values) else False
        found[f.name] = values.to_numpy(dtype=object if text else None)
    return SimpleNamespace(**found)


def bounds_us(family: Family, p: Any, gpu: Gpu, threads: Any) -> tuple[Any, Any]:
    """flops / peak and bytes / bandwidth, in us.

    On a CPU peaks shrink with the share of cores used; bandwidth not below one half.
    """
    share = np.clip(np.asarray(threads, dtype=float) / gpu.sm_count, 1 / gpu.sm_count, 1.0)
    share = share if gpu.kind == "cpu" else np.ones_like(share)
    names, index = np.unique(np.asarray(p.dtype, dtype=object).astype(str), return_inverse=True)
    peaks = np.array([gpu.peak(str(name)) for name in names])[index]
    compute_s = np.asarray(family.flops(p), dtype=float) / (peaks * share)
    memory_s = np.asarray(family.bytes_moved(p), dtype=float)
    memory_s = memory_s / (gpu.hbm_bytes_per_s * np.maximum(share, 0.5))
    return compute_s * 1e6, memory_s * 1e6


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
    the roofline is no launch.
    """
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
    typical = float(np.median(list(known.values()))) if known else 0.0
    found = rows["gpu"].map(lambda gpu: known.get(str(gpu), typical)).to_numpy(dtype=float)
    return np.where(with_launch(rows), found, 0.0)


def identities(rows: pd.DataFrame, family: Family, stacks: Mapping[str, str]) -> dict[str, Any]:
    """GPU over its place, software and place of each row; ``stack`` is else its GPU's usual one."""
    usual = rows["gpu"].map(lambda gpu: stacks.get(str(gpu), ""))
    stack = rows["stack"].where(rows["stack"].notna(), usual) if "stack" in rows else usual
    gpu, place = rows["gpu"].astype(str), pd.Series("", index=rows.index, dtype=object)
    if family.place is not None and len(rows):
        place = pd.Series(family.place(columns(rows, family)), index=rows.index, dtype=object)
        gpu = gpu.where(place == "", gpu + PLACE + place)
    return {"gpu": gpu, "stack": stack.astype(str), "place": place}


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
) -> tuple[pd.DataFrame, np.ndarray]:
    """Features (numbers and strings) and the roofline in us, in the order of the rows."""
    rows = rows.reset_index(drop=True)
    pieces, roofline = [], np.zeros(len(rows))
    for name, index in rows.groupby("gpu", sort=False).groups.items():
        if name not in gpus:
            raise ValueError(f"unknown gpu {name!r}; the bundle knows {sorted(gpus)}")
        gpu, part = gpus[str(name)], rows.loc[index].reset_index(drop=True)
        p = columns(part, family)
        default_threads = gpu.sm_count if gpu.kind == "cpu" else 0
        threads = part["threads"] if "threads" in part else pd.Series([default_threads] * len(part))
        threads = threads.fillna(default_threads)
        cold = (part["cache"] == "cold") if "cache" in part else pd.Series([False] * len(part))
        flops = np.asarray(family.flops(p), dtype=float)
        moved = np.asarray(family.bytes_moved(p), dtype=float)
        roof = roofline_us(family, p, gpu, threads)
        if gpu.kind != "cpu":  # on a CPU the call is the op
            roof = roof + launch_us(part, launch or {})
        roofline[index] = roof
        compute_us, memory_us = bounds_us(family, p, gpu, threads)
        common = {
            "threads": threads.to_numpy(dtype=float),
            "cold": cold.to_numpy(dtype=float),
            "log_flops": np.log2(flops + 1),
            "log_bytes": np.log2(moved + 1),
            "log_cache_fill": np.log2((moved + 1) / gpu.l2_bytes),
            "intensity": np.log2((flops + 1) / (moved + 1)),
            "log_roofline": np.log2(roof),
            "log_bound": np.log2((compute_us + 1e-3) / (memory_us + 1e-3)),
        }
        table = pd.DataFrame({**family.features(p, gpu), **common}, index=index)
        pieces.append(table)
    return pd.concat(pieces).sort_index(), roofline


def shape_groups(rows: pd.DataFrame, family: Family) -> np.ndarray:
    """A number per shape: parameters without dtype, and no conditions of measurement."""
    p = columns(rows, family)
    names = [f.name for f in fields(family.params) if f.name != "dtype"]
    frame = pd.DataFrame({n: getattr(p, n) for n in names})
    return frame.groupby(names, sort=False, dropna=False).ngroup().to_numpy()


class Encoder:
    """Strings to one-hot columns with the vocabulary of the training rows."""

    def __init__(self, names: list[str], vocabulary: dict[str, list[str]]) -> None:
        self.names = names
        self.vocabulary = vocabulary

    @classmethod
    def fit(cls, table: pd.DataFrame) -> Encoder:
        """Every string column becomes one column per value seen."""
        vocabulary = {str(c): sorted(table[c].unique()) for c in table if not is_number(table[c])}
        return cls([str(c) for c in table], vocabulary)

    def encode(self, table: pd.DataFrame) -> np.ndarray:
        """float32, one row per row; unknown strings are all zeros."""
        parts = []
        for name in self.names:
            values = table[name].to_numpy()
            if name in self.vocabulary:
                parts += [(values == v).astype(np.float32) for v in self.vocabulary[name]]
            else:
                parts.append(values.astype(np.float32))
        return np.stack(parts, axis=1) if parts else np.zeros((len(table), 0), np.float32)

    def places(self, chosen: list[str]) -> tuple[int, ...]:
        """Positions of the encoded columns of these features."""
        found: list[int] = []
        at = 0
        for name in self.names:
            width = len(self.vocabulary.get(name, [""]))
            found += range(at, at + width) if name in chosen else []
            at += width
        return tuple(found)


def is_number(values: pd.Series) -> bool:
    """Whether a column holds numbers."""
    return bool(pd.api.types.is_numeric_dtype(values))
