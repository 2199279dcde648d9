"""Charts as plotly describes them: plain values that become JSON in the page.

Colours are names such as ``@blue``, which the page replaces by those of its light or dark theme
(Okabe-Ito); every trace that has a colour of its own has a marker shape or dash of its own too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

import numpy as np
import pandas as pd

from itercast.eval.error_parts import ErrorParts
from itercast.eval.intervals import LEVELS
from itercast.eval.iteration_parts import PARTS
from itercast.eval.results import RETEST, CaseResult, grouped, records
from itercast.extras.pages.op_errors import Groups, kinds, off_log
from itercast.microbench.store import Facts

Json = object  # plain values
Figure = Mapping[str, Json]
Trace = dict[str, Json]
COLOURS = ("@blue", "@orange", "@green", "@pink", "@sky", "@red", "@violet", "@grey")
DASHES = ("solid", "dash", "dot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "triangle-down", "cross")
LEAST_PCT = 0.05  # of the measured iteration: smaller parts get no bar
BAND = (0.8, 1.2)  # of predicted / measured, shaded
MOST_POINTS = 1500  # of a scatter chart; the worst are always among them
WORST_POINTS = 100
TEXT_WIDTH = 48  # characters of a line
ROW_PX, FRAME_PX = 26, 130  # of charts with a row per name
NAMED_ROWS: Figure = {"autorange": "reversed", "type": "category", "title": {"text": ""}}
TIMES, RATIO = "predicted and measured", "ratio of the two"
RATIO_TICKS = (0.1, 0.2, 0.5, 0.8, 1.0, 1.2, 2.0, 5.0, 10.0)
CLOSE_TICKS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 2.0, 2.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The figures that a reader can choose from, by name."""

    figures: Mapping[str, Figure]
    height_px: int = 420


def figure(traces: Sequence[Trace], x: Figure, y: Figure) -> Figure:
    """A figure of traces and two axes."""
    return {"data": list(traces), "layout": {"xaxis": dict(x), "yaxis": dict(y)}}


def marked(number: int, size: float = 8) -> Trace:
    """Colour and shape of the trace with this number."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "symbol": SYMBOLS[number % len(SYMBOLS)],
        "size": size,
        "opacity": 0.85,
    }


def dots_of(number: int, name: str, x: Json, y: Json, hover: str, size: float = 8) -> Trace:
    """The trace with this number as dots, each with what hovering over it shows."""
    shown = {"name": name, "mode": "markers", "marker": marked(number, size)}
    return {**shown, "x": x, "y": y, "hovertemplate": f"{hover}<extra></extra>"}


def curve_of(number: int, name: str, x: Json, y: Json, hover: str) -> Trace:
    """The trace with this number as dots joined by a line."""
    line = {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number % len(DASHES)]}
    return {**dots_of(number, name, x, y, hover), "mode": "lines+markers", "line": line}


def line_of(name: str, x: Json, y: Json) -> Trace:
    """A thin line to compare with."""
    line = {"color": "@muted", "width": 1}
    return {"name": name, "mode": "lines", "line": line, "x": x, "y": y, "hoverinfo": "skip"}


def short(values: Sequence[float] | np.ndarray | pd.Series) -> list[float | None]:
    """Numbers with four digits, so that pages stay small; None for those that are not finite."""
    numbers = np.asarray(values, dtype=float)
    return [float(f"{v:.4g}") if np.isfinite(v) else None for v in numbers]


def _ideal(low: float, high: float, ratio: bool) -> list[Trace]:
    """The line of perfect forecasts (y = x, or y = 1 for a ``ratio``) in a band of 20 %."""
    x = np.array([low, high])
    y = np.ones(2) if ratio else x
    around = short([*(BAND[1] * y), *(BAND[0] * y[::-1])])
    band = line_of("within 20 %", short([*x, *x[::-1]]), around)
    band |= {"fill": "toself", "fillcolor": "@band", "line": {"width": 0}}
    return [band, line_of("perfect forecast", short(x), short(y))]


def _log_axis(title: str, values: Iterable[float | None]) -> Trace:
    """A log axis whose ticks get fewer as its range gets wider.

    Up to a factor of 10: 1, 1.5, 2, 3, 5, 7 of each decade; up to three decades: 1, 2, 5; else 1.
    """
    numbers = [v for v in values if v is not None and v > 0] or [1.0]
    first, last = (int(np.floor(np.log10(end))) for end in (min(numbers), max(numbers)))
    wide = max(numbers) > 10 * min(numbers)
    digits = ((1, 2, 5) if wide else (1, 1.5, 2, 3, 5, 7)) if last - first < 3 else (1,)
    ticks = [digit * 10.0**power for power in range(first, last + 2) for digit in digits]
    labels = [f"{tick:,.6g}" for tick in ticks]
    return {"title": {"text": title}, "type": "log", "tickvals": ticks, "ticktext": labels}


def _ratio_axis(values: pd.Series) -> Trace:
    """A log axis of predicted / measured; closer ticks where all are within a factor of 2.5."""
    near = values.between(CLOSE_TICKS[0], CLOSE_TICKS[-1]).all()
    ticks = CLOSE_TICKS if near else RATIO_TICKS
    labels = [f"{tick:g}" for tick in ticks]
    title = {"text": "predicted / measured"}
    return {"title": title, "type": "log", "tickvals": ticks, "ticktext": labels}


def predicted_measured(unit: str, points: pd.DataFrame, size: float) -> Chart:
    """Predicted / measured over measured times; the reader can switch to both times.

    The ratio comes first: on two log axes of times an error of 20 % is hard to see.


    ``points``: the columns measured, predicted, group (a trace each) and text, and low and high
    where intervals are drawn.
    """
    measured, figures = points["measured"], {}
    x = _log_axis(f"measured, {unit}", measured)
    ratio = _ratio_axis(points["predicted"] / measured)
    ways = ((RATIO, ratio), (TIMES, _log_axis(f"predicted, {unit}", points["predicted"])))
    for name, y in ways:
        traces = _ideal(measured.min() / 1.5, measured.max() * 1.5, name == RATIO)
        for number, (group, mine) in enumerate(points.groupby("group", sort=False)):
            over = mine["measured"] if name == RATIO else 1.0
            traces.append(_group_trace(number, str(group), mine, over, size))
        figures[name] = figure(traces, x, y)
    return Chart(figures=figures, height_px=460)


def _group_trace(
    number: int, name: str, mine: pd.DataFrame, over: pd.Series | float, size: float
) -> Trace:
    """Points of one group at heights predicted / ``over``, with their intervals if known."""
    x, y = short(mine["measured"]), short(mine["predicted"] / over)
    trace = dots_of(number, name, x, y, "%{text}", size)
    trace["text"] = mine["text"].tolist()
    if "low" in mine:
        up, down = mine["high"] - mine["predicted"], mine["predicted"] - mine["low"]
        style = {"type": "data", "symmetric": False, "thickness": 1, "width": 0}
        trace["error_y"] = {**style, "array": short(up / over), "arrayminus": short(down / over)}
    return trace


def iterations(results: Sequence[CaseResult]) -> Chart:
    """Predicted against measured iterations with their 80 % intervals."""
    points = [
        {
            "group": name,
            "measured": r.measured_us / 1e3,
            "predicted": r.predicted_us / 1e3,
            "low": r.predicted_us_p10 / 1e3,
            "high": r.predicted_us_p90 / 1e3,
            "text": case_text(r),
        }
        for name, group in grouped(results).items()
        for r in group
    ]
    return predicted_measured("ms", pd.DataFrame(points), 8)


def case_text(r: CaseResult) -> str:
    """What hovering over a case shows."""
    parts = sorted(r.parts_us.items(), key=lambda item: -item[1])
    split = ", ".join(f"{n} {100 * us / r.predicted_us:.0f} %" for n, us in parts if us > 0)
    lines = [
        f"<b>{r.label}</b>",
        f"predicted {r.predicted_us / 1e3:.4g} ms, measured {r.measured_us / 1e3:.4g} ms",
        f"error {r.error_pct:+.1f} %, retest {r.retest_text} %",
        f"80 % interval {r.predicted_us_p10 / 1e3:.4g} to {r.predicted_us_p90 / 1e3:.4g} ms",
        split,
    ]
    return "<br>".join(line for line in lines if line)


def ops(held_out: pd.DataFrame) -> Chart:
    """Scatter chart of predicted against measured times of held-out ops, by kind of op.

    Of many ops it shows those with the largest errors and a random part of the others.
    """
    order = np.argsort(-off_log(held_out), kind="stable")
    rest = np.random.default_rng(0).permutation(order[WORST_POINTS:])
    shown = held_out.iloc[[*order[:WORST_POINTS], *rest[: MOST_POINTS - WORST_POINTS]]]
    points = shown.rename(columns={"measured_us": "measured", "predicted_us": "predicted"})
    points = points.assign(group=kinds(shown), text=[op_text(row) for row in records(shown)])
    return predicted_measured("us", points.sort_values("group", kind="stable"), size=5)


def op_text(row: Facts) -> str:
    """What hovering over an op shows."""
    error = 100 * (row["predicted_us"] / row["measured_us"] - 1)
    where = [f"{row['cache']} cache"] if "cache" in row else []
    where += [f"{row['threads']} threads"] if row.get("threads") else []
    return "<br>".join(
        [
            f"<b>{row['family']} {row['op']}</b> {row['dtype']}",
            "<br>".join(wrap(row["params"], TEXT_WIDTH, break_long_words=False)),
            f"predicted {row['predicted_us']:.4g} us, measured {row['measured_us']:.4g} us",
            f"error {error:+.1f} %" + "".join(f", {w}" for w in where),
        ]
    )


def dots(rows: Sequence[str], columns: Mapping[str, Sequence[float | None]], axis: str) -> Chart:
    """A row per name with a dot for each column, on a log axis of errors in %."""
    traces = []
    for number, (column, values) in enumerate(columns.items()):
        x = [None if v is None else float(f"{max(v, 0.1):.3g}") for v in values]
        hover = f"%{{y}}<br>{column} %{{x}} %"
        traces.append(dots_of(number, column, x, list(rows), hover, 10))
    values = [v for column in columns.values() for v in column]
    figures = {"": figure(traces, _log_axis(axis, values), NAMED_ROWS)}
    return Chart(figures=figures, height_px=FRAME_PX + ROW_PX * len(rows))


def groups(errors: Groups) -> Chart:
    """Chart of median, 90th percentile and noise floor of errors, a row of dots for each group."""
    names = {
        "median error": "median_ape_pct",
        "90 % of errors are below": "p90_ape_pct",
        "noise floor (retest)": RETEST,
    }
    columns = {name: [group.get(key) for group in errors.values()] for name, key in names.items()}
    return dots(list(errors), columns, "absolute error, %")


def waterfall(found: Sequence[ErrorParts]) -> Chart:
    """Bars that add up to the measured time: parts of the forecast, then each part's error."""
    return Chart(
        figures={one.name: _waterfall(one) for one in found},
        height_px=FRAME_PX + ROW_PX * (2 * len(PARTS) + 1),
    )


def _waterfall(case: ErrorParts) -> Figure:
    """The waterfall of one case, in % of the measured time, from forecast to measured.

    A bar for each part of the forecast, for the error of each, and for what no part explains.
    """
    parts = [p for p in PARTS if case.forecast[p] >= LEAST_PCT]
    steps = [(p, case.forecast[p], "relative") for p in parts]
    steps.append(("<b>forecast</b>", sum(case.forecast.values()), "total"))
    steps += [(f"error of {p}", case.correction[p], "relative") for p in parts]
    steps += [("not attributed", case.unexplained, "relative"), ("<b>measured</b>", 100.0, "total")]
    names, values, measures = zip(*steps, strict=True)
    trace: Trace = {
        "type": "waterfall",
        "orientation": "h",
        "y": names,
        "x": short(values),
        "measure": measures,
        "text": [f"{v:.0f}" if m == "total" else f"{v:+.1f}" for _, v, m in steps],
        "textposition": "outside",
        "cliponaxis": False,
        "increasing": {"marker": {"color": "@blue"}},
        "decreasing": {"marker": {"color": "@orange"}},
        "totals": {"marker": {"color": "@muted"}},
        "connector": {"line": {"color": "@muted", "width": 1}},
        "hovertemplate": "%{y}: %{text} %<extra></extra>",
        "showlegend": False,
    }
    key: list[Trace] = [  # a waterfall has no legend of its own
        {"type": "bar", "x": [None], "y": [None], "name": name, "marker": {"color": colour}}
        for name, colour in (("adds", "@blue"), ("takes away", "@orange"), ("sum", "@muted"))
    ]
    longest = max(sum(case.forecast.values()), 100.0)
    x = {"title": {"text": "% of the measured iteration"}, "range": [0, 1.2 * longest]}
    return figure([trace, *key], x, NAMED_ROWS)


def calibration(covered: Mapping[str, Sequence[float]]) -> Chart:
    """Share of measurements inside intervals against their nominal level."""
    levels = [100 * level for level in LEVELS]
    traces = [line_of("ideal", [0, 100], [0, 100])]
    for number, (name, values) in enumerate(covered.items()):
        hover = f"{name}<br>nominal %{{x}} %, covered %{{y}} %"
        traces.append(curve_of(number, name, levels, short(values), hover))
    x = {"title": {"text": "nominal level, %"}, "range": [0, 100]}
    y = {"title": {"text": "measurements covered, %"}, "range": [0, 102]}
    return Chart(figures={"": figure(traces, x, y)})
