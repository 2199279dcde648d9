"""Tables for people."""

from __future__ import annotations

from itercast.commands.shared import report_table


def entry(rows: int, coverage_pct: float) -> dict[str, object]:
    return {"rows": rows, "coverage_pct": coverage_pct, "learners": {}}


def test_coverage_is_summed_up_over_families() -> None:
    """70 % of 300 rows and 90 % of 100: 75 % of 400."""
    table = report_table({"gemm": entry(300, 70.0), "norm": entry(100, 90.0)})
    assert str(table.caption).startswith("80 % intervals cover 75 % of these shapes")
    assert report_table({}).caption is None
