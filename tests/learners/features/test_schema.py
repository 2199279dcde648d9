"""Rows are checked before anything is learned from them."""

from __future__ import annotations

import pandas as pd
import pytest

from itercast.learners.features.schema import check_rows
from itercast.microbench.ops import families

GEMM = families()["gemm"]
ROW = {"gpu": "x", "status": "ok", "time_us": 3.0, "op": "mm", "m": 3, "n": 4, "k": 5}


def test_whole_rows_pass_and_failed_points_need_no_time() -> None:
    failed = {**ROW, "status": "oom", "time_us": float("nan")}
    check_rows(pd.DataFrame([ROW, failed]), GEMM)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": -3}, "family gemm: m -3: allowed is greater_than_or_equal_to"),
        ({"status": "fine"}, "family gemm: status 'fine': allowed is isin"),
        ({"time_us": 0.0}, "family gemm: time_us 0.0: allowed is in_range"),
        ({"time_us": float("nan")}, "family gemm: time_us nan: allowed is not_nullable"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_rows(pd.DataFrame([{**ROW, **change}]), GEMM)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="column 'k' not in dataframe"):
        check_rows(pd.DataFrame([ROW]).drop(columns="k"), GEMM)
