"""Reads what a sharding is asked for: embedding tables, their lookups, and the dense part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from itercast.compose.tables.placement import Table
from itercast.microbench.ops.lookup.index_streams import IndexStream, parse_indices
from itercast.microbench.store import Facts
from itercast.microbench.yaml_text import load_yaml

DTYPES = ("fp32", "fp16", "bf16")
OPTIMIZERS = ("sgd", "adagrad", "adam")
STATE_PER_WEIGHT: Mapping[str, float] = {"sgd": 0.0, "adagrad": 1.0, "adam": 2.0}
MAX_SIZE = 2**40
TASK_KEYS = ("batch", "features", "bottom", "top", "dim", "optimizer", "tables")
TABLE_KEYS = ("name", "rows", "dim", "pooling", "dtype", "indices", "weighted")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingModel:
    """A DLRM (arXiv:1906.00091) to be sharded; ``batch`` is samples of each rank.

    ``bottom`` and ``top`` are the hidden widths of the two perceptrons, by default those of
    facebookresearch/dlrm for Criteo Kaggle. Pooled vectors of all tables have ``dim`` elements, as
    the interaction needs them.
    """

    batch: int
    tables: tuple[Table, ...]
    features: int = 13
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)
    optimizer: str = "sgd"

    @property
    def dim(self) -> int:
        """Elements of a table's pooled vector."""
        return self.tables[0].dim


def read_model(path: Path) -> RankingModel:
    """The model of a YAML file; ValueError names a wrong key or value and what is allowed."""
    try:
        values = load_yaml(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as exc:
        reason = " ".join(str(exc).split())[:120] or type(exc).__name__
        raise ValueError(f"{str(path)!r}: not a readable YAML file ({reason})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{str(path)!r}: expected keys {', '.join(TASK_KEYS)}")
    try:
        return model_from(values)
    except ValueError as exc:
        raise ValueError(f"{str(path)!r}: {exc}") from None


def model_from(values: Facts) -> RankingModel:
    """The model that plain values describe; ValueError names what is wrong."""
    _check_keys(values, TASK_KEYS, ("batch", "tables"), "model")
    listed = values["tables"]
    if not isinstance(listed, list) or not listed:
        raise ValueError("tables: a list of at least one table")
    dim = _size(values, "dim", 0) if "dim" in values else None
    tables = tuple(_table(i, one, dim) for i, one in enumerate(listed))
    names = [t.name for t in tables]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"table {twice!r}: the name is given twice")
    if len({t.dim for t in tables}) > 1:
        other = next(t for t in tables if t.dim != tables[0].dim)
        raise ValueError(
            f"table {other.name!r}: dim {other.dim}, others have {tables[0].dim}; the interaction "
            "needs one dim"
        )
    optimizer = values.get("optimizer", "sgd")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer {optimizer!r}: allowed are {', '.join(OPTIMIZERS)}")
    model = RankingModel(batch=_size(values, "batch", 1), tables=tables, optimizer=optimizer)
    return replace(
        model,
        features=_size({"features": model.features, **values}, "features", 1),
        bottom=_widths("bottom", values.get("bottom", list(model.bottom))),
        top=_widths("top", values.get("top", list(model.top))),
    )


def _table(number: int, values: object, dim: int | None) -> Table:
    if not isinstance(values, Mapping):
        raise ValueError(f"table {number}: keys {', '.join(TABLE_KEYS)}, got {values!r}"[:200])
    name = str(values.get("name", number))
    values = {**({"dim": dim} if dim else {}), **values}
    try:
        _check_keys(values, TABLE_KEYS, ("rows", "dim", "pooling"), "table")
        dtype, weighted = values.get("dtype", "fp32"), values.get("weighted", False)
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
        if not isinstance(weighted, bool):
            raise ValueError(f"weighted is true or false, got {weighted!r}")
        streams = parse_indices(str(values.get("indices", "uniform")))
        stream = streams[0] if len(streams) == 1 else _of_table(streams, name)
        return Table(
            name=name,
            rows=_size(values, "rows", 1),
            dim=_size(values, "dim", 1),
            pooling=_pooling(values["pooling"]),
            dtype=dtype,
            weighted=weighted,
            stream=stream,
        )
    except ValueError as exc:
        raise ValueError(f"table {name!r}: {exc}") from None


def _of_table(streams: Sequence[IndexStream], name: str) -> IndexStream:
    """The stream of a file of several tables that has this table's name."""
    for stream in streams:
        if stream.lookups is not None and stream.lookups.table == name:
            return stream
    known = [s.lookups.table for s in streams if s.lookups is not None]
    raise ValueError(f"indices: the file has no table of that name; it has {known[:8]}")


def _check_keys(values: Facts, known: Sequence[str], needed: Sequence[str], what: str) -> None:
    unknown = [k for k in values if k not in known]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r} of a {what}; known: {', '.join(known)}")
    missing = [k for k in needed if k not in values]
    if missing:
        raise ValueError(f"key {missing[0]!r} is missing; a {what} needs {', '.join(needed)}")


def _size(values: Facts, key: str, least: int) -> int:
    value = values[key]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value <= MAX_SIZE:
        raise ValueError(f"{key} is a whole number from {least} to {MAX_SIZE}, got {value!r}")
    return int(value)


def _widths(key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is a list of widths, got {value!r}")
    return tuple(_size({key: v}, key, 1) for v in value)


def _pooling(value: object) -> float:
    number = float(value) if isinstance(value, int | float) else math.nan
    if isinstance(value, bool) or not math.isfinite(number) or not 0 < number <= MAX_SIZE:
        raise ValueError(f"pooling is a number above 0, got {value!r}")
    return number
