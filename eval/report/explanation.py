"""Draws an explained forecast: parts of the iteration as a waterfall, and gains of changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from itercast.compose.explain.changes import Change
from itercast.compose.explain.time_parts import COMMUNICATION, COMPUTE, IDLE, TimePart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that colour-blind readers tell apart (Okabe and Ito), and a hatch each for print.
LOOKS = {COMPUTE: ("#0072B2", ""), COMMUNICATION: ("#D55E00", "//"), IDLE: ("#BBBBBB", "..")}
GAIN, LOSS, TOO_MUCH = "#009E73", "#CC79A7", "#BBBBBB"


def explanation(title: str, parts: Sequence[TimePart], changes: Sequence[Change]) -> Figure:
    """A matplotlib figure: parts in ms that add up from left to right, and gains in samples/s."""
    from matplotlib.figure import Figure  # lazy: commands without plots need not pay for it

    rows = len(parts) + len(changes)
    figure = Figure(figsize=(8.0, 0.3 * rows + 2.0), layout="constrained")
    heights = [max(1, len(parts)), max(1, len(changes))]
    above, below = figure.subplots(2, 1, height_ratios=heights)
    figure.suptitle(title)
    _waterfall(above, parts)
    _gains(below, changes)
    return figure


def _waterfall(axes: Axes, parts: Sequence[TimePart]) -> None:
    start_ms, labelled = 0.0, set[str]()
    for row, part in enumerate(parts):
        colour, hatch = LOOKS[part.kind]
        label = "" if part.kind in labelled else part.kind
        labelled.add(part.kind)
        ms = part.time_us / 1e3
        axes.barh(row, ms, left=start_ms, color=colour, hatch=hatch, label=label or None)
        start_ms += ms
        share = f" {100 * part.iteration_frac:.0f} %"
        axes.annotate(share, (start_ms, row), va="center", fontsize=8, annotation_clip=False)
    axes.set_yticks(range(len(parts)), [part.name for part in parts], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set(xlabel="ms of the iteration", xlim=(0, None))
    axes.set_title("where the time goes", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="lower left")


def _gains(axes: Axes, changes: Sequence[Change]) -> None:
    for row, one in enumerate(changes):
        pct = 100 * one.gain_frac
        colour = (GAIN if pct >= 0 else LOSS) if one.fits else TOO_MUCH
        axes.barh(row, pct, color=colour, hatch="" if one.fits else "xx")
        text = f" {pct:+.0f} %" + ("" if one.fits else ", too much memory")
        axes.annotate(text, (max(pct, 0.0), row), va="center", fontsize=8)
    axes.set_yticks(range(len(changes)), [one.name for one in changes], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=1)
    axes.margins(x=0.18)
    axes.set(xlabel="samples per second, % more or fewer")
    axes.set_title("what a change would bring, each alone", fontsize=10)
