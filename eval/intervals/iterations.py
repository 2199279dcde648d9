"""Measured iterations beside forecasts that use no number learned or fitted from their source."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from itercast.eval.compare import compare_all, measured_rows
from itercast.eval.public.left_out_models import forecasts_without, sampled
from itercast.eval.public.model_lines import ModelLine
from itercast.eval.public.models import ASSUMED, INTERVAL, MEASURED, read_lines
from itercast.microbench.importers.base import positive

ONE_ROW = ["source", "gpu", "case", "batch", "plan", "measured"]  # may be in several lines


def cpu_iterations(data: Path, bundle: Path) -> pd.DataFrame:
    """Measured iterations of a CPU; each case counts as a source of its own.

    Columns are those that ``itercast.eval.intervals.common_part.half_widths`` reads.
    """
    return pd.DataFrame(
        {
            "source": r.case,
            "measured": r.measured_us,
            "predicted": r.predicted_us,
            "p10": r.predicted_us_p10,
            "p90": r.predicted_us_p90,
            "assumed_frac": r.assumed_frac,
        }
        for r in compare_all(measured_rows(data, None), bundle)
    )


def public_iterations(public: Path, bundle: Path, most: int) -> pd.DataFrame:
    """Published training steps, each source forecast by models and numbers made without it.

    At most ``most`` rows of each source and line of the public benchmark, drawn at random. Lines
    that calibrate forecasts or hosts on their own rows are left out. Columns as in
    ``cpu_iterations``.
    """
    step = MEASURED["step"]
    known = [(x, rows) for x, rows in read_lines(public, "") if x.part == "step"]
    plain = [(x, rows) for x, rows in known if not (x.calibrated or x.fits_hosts)]
    lines = [(x, rows[positive(rows[step]) > 0]) for x, rows in plain]
    parts = []
    for source in sorted({str(s) for _, rows in lines for s in rows["source"].unique()}):
        mine: list[tuple[ModelLine, pd.DataFrame]] = []
        for line, rows in lines:
            own = sampled(line, rows[rows["source"] == source].reset_index(drop=True), most)
            if len(own):
                mine.append((line, own.assign(measured=own[step])))
        parts += [rows for _, rows in forecasts_without(source, mine, public, bundle)]
    names = {"step": "predicted", INTERVAL[0]: "p10", INTERVAL[1]: "p90", ASSUMED: "assumed_frac"}
    found = pd.concat(parts, ignore_index=True).rename(columns=names)
    found = found.drop_duplicates(ONE_ROW)
    return found[["source", "measured", *names.values()]].reset_index(drop=True)
