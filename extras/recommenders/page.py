"""A page with every measured DLRM iteration beside its forecast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from itercast.capture.base.files import write_atomic
from itercast.extras.pages.blocks import Section, Table
from itercast.extras.pages.charts import predicted_measured
from itercast.extras.pages.page import render
from itercast.extras.recommenders.judge import Judged
from itercast.microbench.hardware.machine import cpu_name

HEAD = ("what", "sharding", "tables", "batch", "optimizer", "forecast ms", "measured ms")
TITLE = "DLRM iterations with sharded tables"


def write_page(folder: Path, judged: Mapping[str, Sequence[Judged]]) -> Path:
    """Write report.html into a folder: a chart with a trace per group, and a table."""
    points = [
        {"group": group, "predicted": j.forecast_us / 1e3, "measured": j.measured_us / 1e3}
        | {"text": f"{j.candidate.name}: {j.error_pct:+.1f} %"}
        for group, some in judged.items()
        for j in some
    ]
    rows = [_cells(group, j) for group, some in judged.items() for j in some]
    section = Section(
        anchor="iterations",
        title="Forecast against measured",
        text=["Every point is a model under a sharding, by its median step."],
        chart=predicted_measured("ms", pd.DataFrame(points), 8),
        table=Table(head=[*HEAD, "error %", "retest %"], rows=rows, wide=(0, 1, 4)),
    )
    page = render(TITLE, (), [section], {"measured on": cpu_name()}, {})
    write_atomic(folder / "report.html", page.encode())
    return folder / "report.html"


def _cells(group: str, j: Judged) -> list[str]:
    model, times_ms = j.candidate.model, (j.forecast_us / 1e3, j.measured_us / 1e3)
    facts = (group, j.candidate.name, str(len(model.tables)), str(model.batch), model.optimizer)
    errors = (f"{j.error_pct:+.1f}", f"{j.retest_pct:.1f}")
    return [*facts, *(f"{ms:.1f}" for ms in times_ms), *errors]
