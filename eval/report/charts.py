"""Charts as plotly describes them: plain values that become JSON in the page.

Colours are names such as ``@blue``, which the page replaces by those of its light or dark theme
(Okabe-Ito); every trace that has a colour of its own has a marker shape or dash of its own too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from itercast.eval.iteration_parts import PARTS
from itercast.eval.report.error_parts import ErrorParts
from itercast.eval.report.intervals import LEVELS
from itercast.eval.report.op_errors import Group, kinds, off_log, records
from itercast.eval.report.sweeps import Step
from itercast.eval.results import CaseResult, grouped
from itercast.microbench.store import Facts

Json = object  # plain values
Figure = Mapping[str, Json]
Trace = dict[str, Json]
Points = Callable[[np.ndarray], list[Trace]]
COLOURS = ("@blue", "@orange", "@green", "@pink", "@sky", "@red", "@violet", "@grey")
DASHES = ("solid", "dash", "dot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "triangle-down", "cross")
LEAST_PCT = 0.05  # of the measured iteration: smaller parts get no bar
BAND = (0.8, 1.2)  # of predicted / measured, shaded
MOST_POINTS = 1500  # of a scatter chart; the worst are always among them
WORST_POINTS = 100
ROW_PX, FRAME_PX = 26, 130  # of charts with a row per name
NAMED_ROWS: Figure = {"autorange": "reversed", "type": "category", "title": {"text": ""}}
TIMES, RATIO = "predicted and measured", "ratio of the two"
RATIO_TICKS = (0.1, 0.2, 0.5, 0.8, 1.0, 1.2, 2.0, 5.0, 10.0)
RATIO_AXIS = {
    "title": {"text": "predicted / measured"},
    "type": "log",
    "tickvals": RATIO_TICKS,
    "ticktext": [f"{tick:g}" for tick in RATIO_TICKS],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart: its name for those who cannot see it, and the figures a reader can choose from."""

    name: str
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


def short(values: Sequence[float] | np.ndarray) -> list[float | None]:
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


def predicted_measured(
    name: str, unit: str, measured: Sequence[float], predicted: Sequence[float], points: Points
) -> Chart:
    """Predicted against measured times; the reader can switch to predicted / measured.

    ``points(over)`` draws the points, a trace per group, at heights predicted / over.
    """
    low, high = min(measured) / 1.5, max(measured) * 1.5
    x = _log_axis(f"measured, {unit}", measured)
    both: Mapping[str, tuple[np.ndarray, Figure]] = {
        TIMES: (np.ones(len(measured)), _log_axis(f"predicted, {unit}", predicted)),
        RATIO: (np.asarray(measured), RATIO_AXIS),
    }
    figures = {
        key: figure([*_ideal(low, high, key == RATIO), *points(over)], x, y)
        for key, (over, y) in both.items()
    }
    return Chart(name=name, figures=figures, height_px=460)


def iterations(results: Sequence[CaseResult]) -> Chart:
    """Predicted against measured iterations with their 80 % intervals."""
    cases = [r for group in grouped(results).values() for r in group]
    group_of = np.array([name for name, group in grouped(results).items() for _ in group])
    ends = [(r.predicted_us_p10, r.predicted_us, r.predicted_us_p90) for r in cases]
    low, predicted, high = np.array(ends).T / 1e3
    measured = np.array([r.measured_us for r in cases]) / 1e3
    texts = np.array([case_text(r) for r in cases])

    def points(over: np.ndarray) -> list[Trace]:
        traces = []
        for number, name in enumerate(grouped(results)):
            mine = group_of == name
            up, down = (high - predicted) / over, (predicted - low) / over
            y, text = short((predicted / over)[mine]), texts[mine].tolist()
            one = dots_of(number, name, short(measured[mine]), y, "%{text}")
            bars = {"array": short(up[mine]), "arrayminus": short(down[mine])}
            style = {"type": "data", "symmetric": False, "thickness": 1, "width": 0}
            traces.append({**one, "text": text, "error_y": {**style, **bars}})
        return traces

    name = "Predicted against measured iterations"
    return predicted_measured(name, "ms", measured.tolist(), predicted.tolist(), points)


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
    """Predicted against measured ops on held-out rows, by kind of op."""
    order = np.argsort(-off_log(held_out), kind="stable")
    rest = np.random.default_rng(0).permutation(order[WORST_POINTS:])
    shown = held_out.iloc[[*order[:WORST_POINTS], *rest[: MOST_POINTS - WORST_POINTS]]]
    kind = kinds(shown)
    measured, predicted = (shown[c].to_numpy() for c in ("measured_us", "predicted_us"))
    texts = np.array([op_text(row) for row in records(shown)])

    def points(over: np.ndarray) -> list[Trace]:
        traces = []
        for number, name in enumerate(sorted(set(kind))):
            mine = kind == name
            y = short((predicted / over)[mine])
            one = dots_of(number, name, short(measured[mine]), y, "%{text}", 5)
            traces.append({**one, "text": texts[mine].tolist()})
        return traces

    name = "Predicted against measured ops"
    return predicted_measured(name, "us", measured.tolist(), predicted.tolist(), points)


def op_text(row: Facts) -> str:
    """What hovering over an op shows."""
    error = 100 * (row["predicted_us"] / row["measured_us"] - 1)
    where = [f"{row['cache']} cache"] if "cache" in row else []
    where += [f"{row['threads']} threads"] if row.get("threads") else []
    return "<br>".join(
        [
            f"<b>{row['family']} {row['op']}</b> {row['dtype']}",
            _folded(row["params"]),
            f"predicted {row['predicted_us']:.4g} us, measured {row['measured_us']:.4g} us",
            f"error {error:+.1f} %" + "".join(f", {w}" for w in where),
        ]
    )


def _folded(text: str, width: int = 48) -> str:
    """A long text in lines of at most about ``width`` characters."""
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(lines)


def dots(
    name: str, rows: Sequence[str], columns: Mapping[str, Sequence[float | None]], axis: str
) -> Chart:
    """A row per name with a dot for each column, on a log axis of errors in %."""
    traces = []
    for number, (column, values) in enumerate(columns.items()):
        x = [None if v is None else float(f"{max(v, 0.1):.3g}") for v in values]
        hover = f"%{{y}}<br>{column} %{{x}} %"
        traces.append(dots_of(number, column, x, list(rows), hover, 10))
    y = NAMED_ROWS
    values = [v for column in columns.values() for v in column]
    figures = {"": figure(traces, _log_axis(axis, values), y)}
    return Chart(name=name, figures=figures, height_px=FRAME_PX + ROW_PX * len(rows))


def groups(name: str, found: Sequence[Group], labels: Sequence[str]) -> Chart:
    """Median, 90th percentile and noise floor of groups of ops."""
    columns: dict[str, Sequence[float | None]] = {
        "median error": [g.median_ape_pct for g in found],
        "90 % of errors are below": [g.p90_ape_pct for g in found],
        "noise floor (retest)": [g.retest_ape_pct for g in found],
    }
    return dots(name, labels, columns, "absolute error, %")


def waterfall(found: Sequence[ErrorParts]) -> Chart:
    """Bars that add up to the measured time: parts of the forecast, then each part's error."""
    return Chart(
        name="Waterfall from the forecast to the measured iteration",
        figures={one.name: _waterfall(one) for one in found},
        height_px=FRAME_PX + ROW_PX * (2 * len(PARTS) + 1),
    )


def _waterfall(one: ErrorParts) -> Figure:
    parts = [p for p in PARTS if one.forecast[p] >= LEAST_PCT]
    steps = [(p, one.forecast[p], "relative") for p in parts]
    steps.append(("<b>forecast</b>", sum(one.forecast.values()), "total"))
    steps += [(f"error of {p}", one.correction[p], "relative") for p in parts]
    steps += [("not attributed", one.unexplained, "relative"), ("<b>measured</b>", 100.0, "total")]
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
    longest = max(sum(one.forecast.values()), 100.0)
    x = {"title": {"text": "% of the measured iteration"}, "range": [0, 1.2 * longest]}
    y = NAMED_ROWS
    return figure([trace, *key], x, y)


def calibration(covered: Mapping[str, Sequence[float]]) -> Chart:
    """Share of measurements inside intervals against their nominal level."""
    levels = [100 * level for level in LEVELS]
    traces = [line_of("ideal", [0, 100], [0, 100])]
    for number, (name, values) in enumerate(covered.items()):
        hover = f"{name}<br>nominal %{{x}} %, covered %{{y}} %"
        traces.append(curve_of(number, name, levels, short(values), hover))
    x = {"title": {"text": "nominal level, %"}, "range": [0, 100]}
    y = {"title": {"text": "measurements covered, %"}, "range": [0, 102]}
    return Chart(name="Calibration of the intervals", figures={"": figure(traces, x, y)})


def learning(steps: Sequence[Step]) -> Chart:
    """Errors on held-out rows against minutes of sweep, or against points."""
    return Chart(
        name="Error against the length of the sweep",
        figures={
            "minutes of sweep": _learning([s.minutes for s in steps], "minutes of sweep", steps),
            "points measured": _learning([s.points for s in steps], "points measured", steps),
        },
    )


def _learning(at: Sequence[float], title: str, steps: Sequence[Step]) -> Figure:
    curves = {
        "median error": [s.median_ape_pct for s in steps],
        "90 % of errors are below": [s.p90_ape_pct for s in steps],
    }
    text = [f"{s.points} points, {s.minutes:.2f} minutes" for s in steps]
    traces = [
        {
            **curve_of(n, name, short(at), short(values), f"%{{text}}<br>{name} %{{y}} %"),
            "text": text,
        }
        for n, (name, values) in enumerate(curves.items())
    ]
    values = [v for curve in curves.values() for v in curve]
    y = _log_axis("error on held-out shapes, %", values)
    return figure(traces, _log_axis(title, at), y)
