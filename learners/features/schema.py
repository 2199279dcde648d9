"""Checks rows of a dataset before anything is learned from them."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from itercast.capture.base.durations import counted
from itercast.capture.base.slow_imports import pd
from itercast.microbench.ops.family import Family, parameter_types

STATUSES = ["ok", "oom", "unsupported", "error", "throttled"]


def check_rows(rows: pd.DataFrame, family: Family) -> None:
    """Raise ValueError, in one line, for the first column with a value that is not allowed.

    Checks status and GPU of every row; time and parameters of rows with status ok. Sizes must be at
    least 0; an optional parameter may be missing.
    """
    import pandera.pandas as pa  # lazy: a forecast checks no rows

    common = pa.DataFrameSchema(
        {"gpu": pa.Column(str), "status": pa.Column(str, pa.Check.isin(STATUSES))}
    )
    columns: dict[str, Any] = {"time_us": pa.Column(float, pa.Check.in_range(1e-3, 1e12))}
    types = parameter_types(family.params)
    for f in fields(family.params):
        optional = f.default is not MISSING
        limit = pa.Check.ge(0) if types[f.name] in (int, float) else None
        columns[f.name] = pa.Column(checks=limit, nullable=optional, required=not optional)
    try:
        common.validate(rows)
        pa.DataFrameSchema(columns).validate(rows[rows["status"] == "ok"])
    except pa.errors.SchemaError as exc:
        raise ValueError(f"rows of family {family.name}: {_one_line(exc)}") from exc


def _one_line(exc: Any) -> str:
    """The column, a value and what is allowed, of the first failed check of pandera."""
    cases = exc.failure_cases
    if isinstance(cases, pd.DataFrame) and len(cases) and exc.check is not None:
        value = cases["failure_case"].tolist()[0]
        column = getattr(exc.schema, "name", None) or "column"
        if exc.check == "not_nullable":
            return f"{column} has no number (NaN) in {counted(len(cases), 'row')}"
        return f"{column} {value!r}: allowed is {getattr(exc.check, 'error', exc.check)}"
    return " ".join(str(exc).split())[:200]
