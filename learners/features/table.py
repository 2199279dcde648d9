"""Turns measured rows into learners' inputs: features, roofline times, shape groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import pd
from itercast.learners.features.rooflines import (
    achieved_rate,
    bounds_us,
    rates_by_row,
    roofline_us,
)
from itercast.microbench.hardware.host import load_host
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Family, Values, parameter_types

SMALL_ROOFLINE_US = assumed(__file__, "small_roofline_us")
LAUNCH_QUANTILE = assumed(__file__, "launch_quantile")
MIN_SMALL_ROWS = 5
CLUSTER_SEPARATOR = " over "  # in "GPU over CLUSTER", see ``origins``
LAUNCH_SEPARATOR = " under "  # in "GPU under SOFTWARE", see ``_launch_keys``
ROOFLINE = "roofline"  # column beside the features while they are computed
Features = dict[str, np.ndarray]  # a column per feature: numbers, or strings as objects
ORIGIN = ("gpu", "stack", "place")  # where a row was measured: GPU, software, cluster


def columns(rows: pd.DataFrame, family: Family) -> SimpleNamespace:
    """The family's parameters as arrays by name; missing values take the field's default.

    Whole numbers are floats, so that products of sizes do not overflow.
    """
    arrays: dict[str, Values] = {}
    types = parameter_types(family.params)
    for f in fields(family.params):
        if f.name in rows:
            values = rows[f.name]
            if f.default is not MISSING and values.hasnans:
                values = values.where(values.notna(), f.default)
            is_text = isinstance(values.iloc[0], str) if len(values) else False
            if is_text and types[f.name] in (int, float):
                first = str(values.iloc[0])[:40]
                raise ValueError(f"family {family.name}: column {f.name!r}: {first!r} is no number")
            number = float if types[f.name] is int else None
            arrays[f.name] = values.to_numpy(dtype=object if is_text else number)
        elif f.default is not MISSING:
            arrays[f.name] = broadcast(f.default, len(rows))
        else:
            raise ValueError(f"family {family.name}: rows lack the column {f.name!r}")
    return SimpleNamespace(**arrays)


def broadcast(values: Values, count: int) -> np.ndarray:
    """Repeat a value to one per row; text becomes objects, which numpy compares as Python does."""
    array = np.broadcast_to(np.asarray(values), count)
    return array.astype(object) if array.dtype.kind == "U" else array


def map_values(
    values: np.ndarray, table: Mapping[Any, Any], other: Any, dtype: Any = object
) -> np.ndarray:
    """Look each row's value up in ``table``; ``other`` where it has none."""
    codes, distinct = pd.factorize(values)
    mapped = [table.get(value, other) for value in distinct]
    return np.array([*mapped, other], dtype=dtype)[codes]  # a missing value has the code -1


def isin(values: np.ndarray, seen: Iterable[str]) -> np.ndarray:
    """Mask of the strings that are in ``seen``; np.isin is slow on objects."""
    return map_values(values, dict.fromkeys(seen, True), False, bool)


def least_us(rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]) -> np.ndarray:
    """A lower bound in us: the FLOP that no kernel avoids (``least_flops``) at the GPU's peak.

    On GeForce cards it counts all FLOP of products that accumulate in fp32 on tensor cores, which
    run at half rate there; rooflines use the full rate. 0 where neither holds.
    """
    bound_us = np.zeros(len(rows))
    for name in rows["gpu"].unique():
        gpu, on_gpu = gpus[name], (rows["gpu"] == name).to_numpy()
        halved = gpu.full_rate_flops_per_s
        if gpu.kind == "cpu" or not (halved or family.least_flops):
            continue
        p = columns(rows[on_gpu], family)
        flops = np.where(isin(p.dtype, halved), np.asarray(family.flops(p), float), 0.0)
        if family.least_flops is not None:
            flops = np.maximum(flops, family.least_flops(p, gpu, partial(achieved_rate, gpu)))
        bound_us[on_gpu] = 1e6 * flops / rates_by_row(p, gpu.peak)
    return bound_us


def _is_cold(rows: pd.DataFrame) -> np.ndarray:
    """1 for rows that were timed with flushed caches, else 0."""
    if "cache" not in rows:
        return np.zeros(len(rows))
    return np.asarray(rows["cache"] == "cold", dtype=float)


def _stacks(rows: pd.DataFrame) -> np.ndarray:
    """The software of each row; "" where none is stated."""
    if "stack" not in rows:
        return np.full(len(rows), "", dtype=object)
    return np.asarray(rows["stack"].fillna(""), dtype=object)


def with_launch(rows: pd.DataFrame) -> np.ndarray:
    """Mask of the rows that were timed from the host, so that times include the launch."""
    if "timer" not in rows:
        return np.zeros(len(rows), dtype=bool)
    return (rows["timer"] == "with_launch").to_numpy(dtype=bool)


def learn_launch_us(
    rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]
) -> dict[str, float]:
    """Estimate host launch times in us by GPU and software, from rows timed from the host.

    launch = 1 % quantile of (time - roofline) over ops whose roofline is at most
    SMALL_ROOFLINE_US, of rows of one GPU and software (``_launch_keys``): another host and another
    way of timing have another launch. Where there are fewer than MIN_SMALL_ROWS such ops it is the
    least launch of that software's other GPUs, or of all, else the usual host's: time over the
    roofline of large ops is no launch. None for family ``host``, where the call itself is the op.
    """
    if family.on_host:
        return {}
    timed = rows[with_launch(rows)]
    launches, too_few = {}, []
    for key, part in timed.groupby(_launch_keys(timed)):
        p, gpu = columns(part, family), gpus[str(part["gpu"].iloc[0])]
        floor_us = roofline_us(family, p, gpu, np.zeros(len(part)), _is_cold(part), _stacks(part))
        small = floor_us <= SMALL_ROOFLINE_US
        over_roofline_us = part["time_us"].to_numpy(dtype=float)[small] - floor_us[small]
        if small.sum() < MIN_SMALL_ROWS:
            too_few.append(str(key))
        else:
            launches[str(key)] = max(0.0, float(np.quantile(over_roofline_us, LAUNCH_QUANTILE)))
    least = {key: _least_of_software(key, launches) for key in too_few}
    return {**launches, **least}


def _least_of_software(key: str, launches: Mapping[str, float]) -> float:
    """The least of the known launches of a key's software, else of all, else the usual host's."""
    software = key.partition(LAUNCH_SEPARATOR)[2]
    same = [us for k, us in launches.items() if k.partition(LAUNCH_SEPARATOR)[2] == software]
    return min(same or launches.values(), default=load_host().launch_us)


def _launch_keys(rows: pd.DataFrame) -> np.ndarray:
    """What a launch is known by: "GPU under SOFTWARE", or the GPU where no software is stated."""
    gpu = rows["gpu"].to_numpy(dtype=object)
    if "stack" not in rows:
        return gpu
    stack = _stacks(rows)
    return np.asarray(gpu + np.where(stack == "", "", LAUNCH_SEPARATOR + stack), dtype=object)


def launch_us(rows: pd.DataFrame, launches: Mapping[str, float]) -> np.ndarray:
    """Launch in us to add to each row's roofline, by its GPU and software, or by its GPU.

    Where neither is known, it is the median of all; where none is, that of the usual host.
    """
    timed = with_launch(rows)
    if not timed.any():
        return np.zeros(len(rows))
    typical = float(np.median(list(launches.values()))) if launches else load_host().launch_us
    by_gpu = map_values(rows["gpu"].to_numpy(dtype=object), launches, typical, float)
    exact = map_values(_launch_keys(rows), launches, np.nan, float)
    return np.where(timed, np.where(np.isnan(exact), by_gpu, exact), 0.0)


def origins(rows: pd.DataFrame, family: Family, stacks: Mapping[str, str]) -> Features:
    """Where each row was measured: GPU, software, and cluster if the family names one.

    The GPU is then "GPU over CLUSTER". A row without ``stack`` takes the usual one of its GPU.
    """
    gpu = rows["gpu"].to_numpy(dtype=object)
    stack = map_values(gpu, stacks, "")
    if "stack" in rows:
        stack = rows["stack"].where(rows["stack"].notna(), stack).to_numpy(dtype=object)
    place = np.full(len(rows), "", dtype=object)
    if family.place is not None:
        place = broadcast(family.place(columns(rows, family)), len(rows))
        gpu = gpu + np.where(place == "", "", CLUSTER_SEPARATOR + place)
    return {"gpu": gpu, "stack": stack, "place": place}


def usual_stacks(rows: pd.DataFrame) -> dict[str, str]:
    """Return, by GPU, the software stack with most measured (op, dtype) pairs; ties: most rows."""
    if "stack" not in rows:
        return {}
    stated = rows.dropna(subset=["stack"])
    pair = [name for name in ("op", "dtype") if name in rows]
    rows_of_pair = stated.groupby(["gpu", "stack", *pair]).size()
    counts = rows_of_pair.groupby(level=["gpu", "stack"]).agg(["size", "sum"])  # pairs, rows
    order = counts.reset_index().sort_values(["size", "sum"], ascending=False, kind="stable")
    return {str(gpu): str(stack) for gpu, stack in order.groupby("gpu")["stack"].first().items()}


def feature_table(
    rows: pd.DataFrame,
    family: Family,
    gpus: Mapping[str, Gpu],
    launch: Mapping[str, float] | None = None,
) -> tuple[Features, np.ndarray]:
    """Features (numbers and strings) and roofline in us of rows of any GPUs, in their order.

    ``launch`` by GPU in us is added to the roofline of rows timed from the host.
    """
    codes, names = pd.factorize(rows["gpu"].to_numpy(dtype=object), use_na_sentinel=False)
    pieces, places = [], []
    for code, name in enumerate(names):
        if name not in gpus:
            raise ValueError(f"unknown gpu {name!r}; the bundle knows {sorted(gpus)}")
        places.append(np.flatnonzero(codes == code))
        part = rows if len(names) == 1 else rows.iloc[places[-1]]
        pieces.append(_features_on(part, family, gpus[name], launch or {}))
    features = pieces[0]
    if len(pieces) > 1:
        order = np.argsort(np.concatenate(places))
        features = {name: np.concatenate([p[name] for p in pieces])[order] for name in pieces[0]}
    return features, features.pop(ROOFLINE)


def _features_on(
    rows: pd.DataFrame, family: Family, gpu: Gpu, launch: Mapping[str, float]
) -> Features:
    """Features of rows of one GPU; the column ``ROOFLINE`` holds their roofline in us.

    ``log_roofline`` is of the peak, also where the roofline is of the achieved rate: trees that
    know a GPU by its peak and bandwidth forecast others better, as ``--line "gemm, source"`` says.
    """
    p, count = columns(rows, family), len(rows)
    threads = broadcast(float(gpu.sm_count if gpu.kind == "cpu" else 0), count)
    if "threads" in rows:
        stated = rows["threads"].to_numpy(dtype=float)
        threads = np.where(np.isnan(stated), threads, stated)
    cold = _is_cold(rows)
    flops = np.asarray(family.flops(p), dtype=float)
    bytes_moved = np.asarray(family.bytes_moved(p), dtype=float)
    roofline = roofline_us(family, p, gpu, threads, cold, _stacks(rows))
    at_peak = roofline  # where features tell of rates that GPUs achieve, trees learn of larger ops
    if family.at_achieved_rate:
        family_at_peak = replace(family, at_achieved_rate=False)
        at_peak = roofline_us(family_at_peak, p, gpu, threads, cold, _stacks(rows))
    if gpu.kind != "cpu":  # on a CPU the call is part of the op
        added_us = launch_us(rows, launch)
        roofline, at_peak = roofline + added_us, at_peak + added_us
    compute_us, memory_us = bounds_us(family, p, gpu, threads)
    common = {
        "threads": threads,
        "cold": cold,
        "log_flops": np.log2(flops + 1),
        "log_bytes": np.log2(bytes_moved + 1),
        "log_cache_fill": np.log2((bytes_moved + 1) / gpu.l2_bytes),
        "intensity": np.log2((flops + 1) / (bytes_moved + 1)),
        "log_roofline": np.log2(at_peak),
        "log_bound": np.log2((compute_us + 1e-3) / (memory_us + 1e-3)),
    }
    features = {**family.features(p, gpu), **common, ROOFLINE: roofline}
    return {name: broadcast(values, count) for name, values in features.items()}


def shape_groups(rows: pd.DataFrame, family: Family) -> np.ndarray:
    """Numbers the shape groups of rows: rows with equal parameters other than dtype share a number.

    Whole groups are held out for testing. In family ``host`` some events have a single shape, which
    could not be held out; there each repetition (``trial``) is a group.
    """
    shapes = _shapes(rows, family)
    return shapes.groupby(list(shapes), sort=False, dropna=False).ngroup().to_numpy()


def shape_places(rows: pd.DataFrame, family: Family) -> np.ndarray:
    """A hash in [0, 1) of each row's shape group, by which a split takes it to train or to test.

    It depends on the group's parameters alone, so that more rows change no earlier split.
    """
    shapes = _shapes(rows, family)
    numbers = shapes.select_dtypes(["number", "bool"]).columns
    shapes = shapes.astype(dict.fromkeys(numbers, float)).astype(str)
    return pd.util.hash_pandas_object(shapes, index=False).to_numpy() / 2.0**64


def _shapes(rows: pd.DataFrame, family: Family) -> pd.DataFrame:
    """The parameters that make a shape group."""
    p = columns(rows, family)
    names = [f.name for f in fields(family.params) if f.name != "dtype"]
    frame = pd.DataFrame({n: getattr(p, n) for n in names})
    if "trial" in frame:
        single = frame.groupby("op")["tensors"].transform("nunique") == 1
        frame["trial"] = np.where(single, -1 - np.arange(len(frame)), frame["trial"])
    return frame


class Encoder:
    """Encodes features as float32 columns: strings one-hot, by the training rows' vocabulary."""

    def __init__(self, names: list[str], vocabulary: dict[str, list[str]]) -> None:
        self.names = names
        self.vocabulary = vocabulary

    @classmethod
    def fit(cls, table: Features) -> Encoder:
        """An encoder for these features, with one column per value of every string."""
        texts = [name for name, values in table.items() if not is_number(values)]
        return cls(list(table), {name: sorted(pd.unique(table[name])) for name in texts})

    def encode(self, table: Features) -> np.ndarray:
        """Encode features as a float32 matrix (rows, columns); unknown strings become zeros."""
        parts = []
        for name in self.names:
            values, words = _column(table, name), self.vocabulary.get(name)
            if words is None:
                parts.append(values.astype(np.float32)[:, None])
            else:
                index = map_values(values, {value: i for i, value in enumerate(words)}, -1, int)
                parts.append((index[:, None] == np.arange(len(words))).astype(np.float32))
        return np.hstack(parts)

    def column_numbers(self, wanted: list[str]) -> tuple[int, ...]:
        """Numbers of the columns of ``wanted`` features: NAME, or one NAME=VALUE of a string."""
        numbers: list[int] = []
        start = 0
        for name in self.names:
            columns = [f"{name}={value}" for value in self.vocabulary.get(name, [""])]
            numbers.extend(
                start + i for i, c in enumerate(columns) if name in wanted or c in wanted
            )
            start += len(columns)
        return tuple(numbers)


def in_envelope(
    table: Features, envelope: Mapping[str, tuple[float, float]], encoder: Encoder
) -> np.ndarray:
    """Mask of rows whose numbers lie within the training range and whose strings were seen.

    An unseen cluster of a seen GPU counts as inside: clusters share most of what decides times.
    """
    inside = np.ones(len(table["gpu"]), dtype=bool)
    for name, (low, high) in envelope.items():
        values = _column(table, name)
        inside &= (values >= low - 1e-6) & (values <= high + 1e-6)
    for name, seen in encoder.vocabulary.items():
        if name == "gpu":
            seen_gpus = {value.partition(CLUSTER_SEPARATOR)[0] for value in seen}
            codes, distinct = pd.factorize(_column(table, name))
            was_seen = [str(v).partition(CLUSTER_SEPARATOR)[0] in seen_gpus for v in distinct]
            inside &= np.array(was_seen)[codes]
        elif name not in ORIGIN:
            inside &= isin(_column(table, name), seen)
    return inside


def _column(table: Features, name: str) -> np.ndarray:
    """A feature that a bundle states; ValueError where the family has none of this name."""
    if name not in table:
        raise ValueError(f"the bundle's feature {name!r} is none of {sorted(table)}")
    return table[name]


def is_number(values: np.ndarray) -> bool:
    """Whether a column holds numbers."""
    return values.dtype.kind in "biuf"
