"""The table printed after training: errors by family and learner, coverage of the intervals."""

from io import StringIO
from typing import Any

from rich.console import Console

from itercast.commands.shared import report_table
from itercast.learners.models.compared import NAMES


def printed(report: dict[str, Any]) -> str:
    """The table as a terminal of 80 columns shows it."""
    text = StringIO()
    Console(width=80, file=text, force_terminal=True, color_system=None).print(report_table(report))
    return text.getvalue()


def entry(rows: int, coverage_pct: float, **medians: float) -> dict[str, Any]:
    """A family's report."""
    learners = {name: {"median_ape_pct": value} for name, value in medians.items()}
    return {"rows": rows, "coverage_pct": coverage_pct, "learners": learners}


def test_a_line_has_the_median_error_of_each_learner() -> None:
    """Those that some family was scored with, the blend first; a dash for what is missing."""
    families = {"gemm": entry(300, 70.4, blend=2.04, nearest=9.96), "norm": entry(9, 80, linear=5)}
    line = next(line for line in printed(families).splitlines() if "gemm" in line)
    assert line.split() == ["gemm", "300", "-", "70", "2.0", "10.0", "-"]


def test_coverage_of_all_families_is_weighted_by_their_rows() -> None:
    """(300 * 70 % + 100 * 90 %) / 400 = 75 %; a family without intervals does not count."""
    families = {"gemm": entry(300, 70.0), "norm": entry(100, 90.0)}
    families["host"] = {"rows": 1000, "coverage_pct": None, "learners": {}}
    assert "80 % intervals cover 75 %" in " ".join(printed(families).split())
    assert "intervals" not in printed({})


def test_all_learners_fit_into_80_columns() -> None:
    """Nothing is cut: all headings, the longest family and its numbers of the usual sizes."""
    medians = dict.fromkeys(NAMES, 51.27) | {"roofline": 313.2}
    families = {"embedding_bag": entry(1710, 87.0, **medians) | {"retest_ape_pct": 28.0}}
    text = printed(families)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    line = next(line for line in text.splitlines() if "embedding_bag" in line)
    assert line.split() == ["embedding_bag", "1710", "28.0", "87", *["51.3"] * 4, "313"]
