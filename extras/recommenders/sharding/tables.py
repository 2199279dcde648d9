"""Reads what a sharding is asked for: embedding tables, their lookups, and the dense part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from itercast.capture.base.yaml_text import made_of, read_mapping
from itercast.extras.recommenders.sharded_model import RankingModel, Table
from itercast.extras.recommenders.tables.index_streams import IndexStream, parse_indices
from itercast.microbench.store import Facts

DTYPES = ("fp32", "fp16", "bf16")
OPTIMIZERS = ("sgd", "adagrad", "adam")
MAX_SIZE = 2**40
TABLE_KEYS = ("name", "rows", "dim", "pooling", "dtype", "indices", "weighted")


def read_model(path: Path) -> RankingModel:
    """The model of a YAML file; ValueError names a wrong key or value and what is allowed."""
    values = read_mapping(path, "file of tables")
    try:
        return model_from(values)
    except ValueError as exc:
        raise ValueError(f"{str(path)!r}: {exc}") from None


def model_from(values: Facts) -> RankingModel:
    """The model that plain values describe; ``dim`` is that of tables which state none.

    ValueError names what is wrong.
    """
    listed = values.get("tables")
    if not isinstance(listed, list) or not listed:
        raise ValueError("tables: a list of at least one table")
    tables = tuple(_table(i, one, values.get("dim")) for i, one in enumerate(listed))
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
    facts = {key: value for key, value in values.items() if key != "dim"}
    model = made_of(RankingModel, {**facts, "tables": tables}, "model")
    if model.optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer {model.optimizer!r}: allowed are {', '.join(OPTIMIZERS)}")
    _check_sizes("model", batch=model.batch, features=model.features)
    for name, widths in (("bottom", model.bottom), ("top", model.top)):
        _check_sizes("model", **{name: min(widths, default=0)})
        _check_sizes("model", **{name: max(widths)})
    return model


def _table(number: int, values: object, dim: int | None) -> Table:
    if not isinstance(values, Mapping):
        raise ValueError(f"table {number}: keys {', '.join(TABLE_KEYS)}, got {values!r}"[:200])
    name = str(values.get("name", number))
    where = f"table {name!r}"
    if others := [key for key in values if key not in TABLE_KEYS]:
        raise ValueError(f"{where}: unknown key {others[0]!r}; known: {', '.join(TABLE_KEYS)}")
    facts = {**({"dim": dim} if dim else {}), **values, "name": name}
    try:
        streams = parse_indices(str(facts.pop("indices", "uniform")))
        stream = streams[0] if len(streams) == 1 else _of_table(streams, name)
    except ValueError as exc:
        raise ValueError(f"{where}: {exc}") from None
    table = made_of(Table, {**facts, "stream": stream}, where)
    if table.dtype not in DTYPES:
        raise ValueError(f"{where}: dtype {table.dtype!r}: allowed are {', '.join(DTYPES)}")
    if not table.pooling:
        raise ValueError(f"{where}: pooling is a number above 0, got {table.pooling:g}")
    _check_sizes(where, rows=table.rows, dim=table.dim, pooling=table.pooling + 1)
    return table


def _of_table(streams: Sequence[IndexStream], name: str) -> IndexStream:
    """The stream of a file of several tables that has this table's name."""
    for stream in streams:
        if stream.lookups is not None and stream.lookups.table == name:
            return stream
    known = [s.lookups.table for s in streams if s.lookups is not None]
    raise ValueError(f"indices: the file has no table of that name; it has {known[:8]}")


def _check_sizes(where: str, **sizes: float) -> None:
    for key, size in sizes.items():
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"{where}: {key} is from 1 to {MAX_SIZE}, got {size:g}")
