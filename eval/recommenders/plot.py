"""Plot of forecast against measured iterations of DLRMs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from itercast.eval.recommenders.judge import Judged


def save_scatter(path: Path, groups: Sequence[tuple[str, Sequence[Judged]]]) -> None:
    """Write a scatter plot of forecast against measured times in ms, with a 20 % band."""
    from matplotlib.figure import Figure  # lazy: nothing else here needs it
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    every = [us / 1e3 for _, some in groups for j in some for us in (j.measured_us, j.forecast_us)]
    low, high = min(every) / 1.3, max(every) * 1.3
    axes.fill_between([low, high], [0.8 * low, 0.8 * high], [1.2 * low, 1.2 * high], alpha=0.15)
    axes.plot([low, high], [low, high], color="grey", linewidth=1)
    for marker, (name, some) in zip("os^", groups, strict=False):
        x, y = ([us / 1e3 for us in all_us] for all_us in _times_us(some))
        axes.plot(x, y, marker, markersize=5, label=name, alpha=0.7)
    axes.legend(frameon=False)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):  # 1, 2, 5, 10, 20... as plain numbers
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="measured, ms", ylabel="forecast, ms")
    axes.set_title("DLRM iterations with sharded tables; band: 20 %")
    figure.savefig(path, dpi=110)


def _times_us(some: Sequence[Judged]) -> tuple[list[float], list[float]]:
    return [j.measured_us for j in some], [j.forecast_us for j in some]
