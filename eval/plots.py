"""Plots of forecasts against measured iterations."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from textwrap import wrap
from typing import Any

from eval.results import CaseResult, grouped

EDGE = 0.7  # share of the axis beyond which a label is drawn towards the middle
NAMED = 12  # at most so many cases are labelled in the scatter plot, if off by more than 20 %


def _measured_us(r: CaseResult) -> float:
    return r.measured_us


def _predicted_us(r: CaseResult) -> float:
    return r.predicted_us


def scatter(results: Sequence[CaseResult]) -> Any:
    """Scatter plot of predicted against measured times on log axes, with a 20 % band."""
    from matplotlib.figure import Figure  # lazy: commands without plots need not pay for it

    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    measured = [r.measured_us / 1e3 for r in results]
    everything = [*measured, *(r.predicted_us / 1e3 for r in results)]
    low, high = min(everything) / 1.6, max(everything) * 1.6
    axes.fill_between([low, high], [0.8 * low, 0.8 * high], [1.2 * low, 1.2 * high], alpha=0.15)
    axes.plot([low, high], [low, high], color="grey", linewidth=1)
    for number, (name, group) in enumerate(grouped(results).items()):
        x, y = ([f(r) / 1e3 for r in group] for f in (_measured_us, _predicted_us))
        axes.plot(x, y, "os"[number], color=f"C{number}", markersize=5, label=name, alpha=0.8)
    for r, at in named(results):
        below, place = r.error_pct < 0, log(at[0] / low) / log(high / low)
        left = place > EDGE if below else place > 1 - EDGE  # off the diagonal, inside the axes
        shift = (-5 if left else 5, -4 if below else 4)
        beside: dict[str, Any] = {"xytext": shift, "textcoords": "offset points"}
        beside |= {"ha": "right" if left else "left", "va": "top" if below else "bottom"}
        axes.annotate(lines(r, 24), at, fontsize=8, annotation_clip=True, **beside)
    axes.legend(frameon=False)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="measured, ms", ylabel="predicted, ms")
    axes.set_title("training iterations; band: 20 %")
    for text in axes.texts:
        text.set_in_layout(False)  # a name takes no room from the axes
    return figure


def lines(r: CaseResult, width: int) -> str:
    """A case's label wrapped to ``width`` characters and at most two lines; the rest is cut."""
    parts = wrap(r.label.replace(",", ", "), width)
    return "\n".join([*parts[:1], " ".join(parts[1:3])[: width - 1] + " …"] if parts[2:] else parts)


def named(results: Sequence[CaseResult]) -> list[tuple[CaseResult, tuple[float, float]]]:
    """The worst cases with (measured, predicted) in ms, skipping those whose labels overlap."""
    found: list[tuple[CaseResult, tuple[float, float]]] = []
    for r in sorted(results, key=lambda r: -abs(r.error_pct))[:NAMED]:
        x, y = _measured_us(r) / 1e3, _predicted_us(r) / 1e3
        clear = all(max(y / b, b / y) > 1.25 or max(x / a, a / x) > 5 for _, (a, b) in found)
        if abs(r.error_pct) > 20 and clear:
            found.append((r, (x, y)))
    return found


def breakdown(results: Sequence[CaseResult]) -> Any:
    """Bar chart of the predicted time by op family, as a share of the measured time."""
    from matplotlib import colormaps  # lazy, as above
    from matplotlib.figure import Figure

    names = [lines(r, 40) for r in results]
    rows = len(results) + sum("\n" in name for name in names) / 2
    figure = Figure(figsize=(7.2, 0.34 * rows + 1.4), layout="constrained")
    axes = figure.subplots()
    families = sorted({f for r in results for f in r.by_family_us})
    shades: Any = colormaps["tab20"]  # ten dark ones, each beside a light one
    left = [0.0] * len(results)
    places = range(len(results))
    for i, family in enumerate(families):
        shares = [100 * r.by_family_us.get(family, 0.0) / r.measured_us for r in results]
        axes.barh(places, shares, left=left, label=family, color=shades(2 * (i % 10) + i // 10))
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.axvline(100, color="black", linewidth=1)
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="predicted time by family, % of the measured iteration")
    figure.legend(fontsize=8, ncols=4, loc="outside lower center")
    return figure
