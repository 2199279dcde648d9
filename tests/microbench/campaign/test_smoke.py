"""The check of a GPU's first rows: implausible times, families without rows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from itercast.microbench.campaign.smoke import ImplausibleRows, check
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.memory.elementwise import Elementwise
from itercast.microbench.store import write_part

TOY = Gpu(name="toy", sm_count=1, peak_flops_per_s={"fp32": 1e12}, hbm_bytes_per_s=1e11)
# 2 * 1000^3 flops at 1e12 a second: 2000 us; 3 * 1000^2 * 4 bytes at 1e11 a second: 120 us
FINE = {"gpu": "toy", "status": "ok", "reason": "", "cache": "warm"}
PRODUCT = {**asdict(Gemm(op="mm", m=1000, n=1000, k=1000, dtype="fp32")), "family": "gemm", **FINE}
# a sum of two tensors of 1e6 elements: 12e6 bytes at 1e11 a second, 120 us
SUM = {**asdict(Elementwise(op="add", numel=10**6, tensors=2)), "family": "elementwise", **FINE}


def wrong(root: Path, *rows: dict[str, Any]) -> list[str]:
    """What is wrong with the rows, one part each."""
    for number, row in enumerate(rows):
        write_part(root, row["family"], "toy", pd.DataFrame([row]), str(number))
    return check(root, TOY, ("gemm", "elementwise"))


def test_times_at_the_roofline_are_fine(tmp_path: Path) -> None:
    """A warm cache may serve the sum ten times as fast as memory does."""
    rows = ({**SUM, "cache": "cold", "time_us": 130.0}, {**SUM, "cache": "warm", "time_us": 13.0})
    assert wrong(tmp_path, {**PRODUCT, "time_us": 2100.0}, *rows) == []


def test_times_below_six_tenths_of_it_are_listed(tmp_path: Path) -> None:
    """0.6 * 2000 = 1200 us for the product, 0.6 * 120 = 72 for the cold sum."""
    bad = [{**PRODUCT, "time_us": 1100.0}, {**SUM, "cache": "cold", "time_us": 60.0}]
    good = [{**PRODUCT, "time_us": 1300.0}] * 2
    assert wrong(tmp_path, *bad, *good) == [
        "gemm: 1 of 3 times are implausible, e.g. mm warm: 1.1e+03 us, roofline 2e+03 us",
        "elementwise: 1 of 1 times are implausible, e.g. add cold: 60 us, roofline 120 us",
    ]


def test_a_family_without_rows_is_listed(tmp_path: Path) -> None:
    failed = {**SUM, "cache": "warm", "status": "error", "reason": "no"}
    found = wrong(tmp_path, {**PRODUCT, "time_us": 2100.0}, failed)
    assert found == ["elementwise: none of 1 rows is ok"]


def test_mostly_implausible_rows_end_the_run(tmp_path: Path) -> None:
    expected = r"gemm: 1 of 1 times.*elementwise: none of 0 rows is ok"
    with pytest.raises(ImplausibleRows, match=expected):
        wrong(tmp_path, {**PRODUCT, "time_us": 0.0})
