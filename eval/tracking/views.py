"""How MLflow's pages show an experiment: saved views with columns, order and charts, colours.

A saved view is a tag of the experiment, ``mlflow.sharedViewState.<name>``, that MLflow's own page
lists under "Views". A page's address names the view to open (``viewStateShareKey``); where it names
none, ``itercast.eval.tracking.server`` opens the view FIRST.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TAG = "mlflow.sharedViewState."
FIRST = "itercast"  # name of the view that an experiment opens with
WIDTHS = {  # of columns, in pixels; DEFAULT_WIDTH of the others
    "tags.family": 130,
    "tags.learner": 120,
    "tags.runner_up": 160,
    "tags.training": 220,
    "tags.line": 220,
    "metrics.median_ape_pct": 115,
    "metrics.geomean_ape_pct": 125,
    "metrics.noise_floor_pct": 120,
    "metrics.retest_ape_pct": 110,
    "metrics.rank": 60,
    "metrics.rows": 60,
    "metrics.cases": 60,
    "tags.champion": 120,
    "attributes.Dataset": 200,
}
DEFAULT_WIDTH = 90
# Colours that the colour-blind tell apart. Source: Okabe and Ito, https://jfly.uni-koeln.de/color/
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A list of runs with some columns, in some order, and bar charts of metrics beside it.

    ``columns``: such as ``tags.family`` and ``metrics.mape_pct``. ``where``: MLflow's filter.
    """

    title: str
    columns: Sequence[str]
    order_by: str
    ascending: bool = True
    where: str = ""
    charts: Sequence[str] = ()

    def state(self) -> dict[str, Any]:
        """The view as MLflow's page keeps it."""
        columns = [quoted(name) for name in self.columns]
        found: dict[str, Any] = {
            "selectedColumns": columns,
            "columnOrder": columns,
            "columnWidths": {quoted(c): WIDTHS.get(c, DEFAULT_WIDTH) for c in self.columns},
            "searchFilter": self.where,
            "orderByKey": quoted(self.order_by),
            "orderByAsc": self.ascending,
            "runsHiddenMode": "SHOW_ALL",
        }
        if self.charts:
            found |= bar_charts(self.charts)
        return found

    def tag(self, time_ms: int) -> str:
        """The value of the experiment's tag."""
        times = {"createdAt": time_ms, "updatedAt": time_ms}
        return json.dumps({"name": self.title, **times, "state": json.dumps(self.state())})


def quoted(name: str) -> str:
    """``metrics.mape_pct`` as MLflow writes it, with backticks."""
    kind, key = name.split(".", 1)
    return f"{kind}.`{key}`"


def bar_charts(metrics: Sequence[str]) -> dict[str, Any]:
    """A section with a bar chart of each metric, a bar per run."""
    section = {"uuid": "errors", "name": "Errors", "display": True, "isReordered": False}
    cards = [
        {
            "type": "BAR",
            "uuid": f"bar-{name}",
            "metricKey": name,
            "metricSectionId": "errors",
            "deleted": False,
            "isGenerated": False,
        }
        for name in metrics
    ]
    return {"compareRunCharts": cards, "compareRunSections": [section]}


ERRORS = ("median_ape_pct", "p90_ape_pct", "mape_pct", "bias_pct")
SCORES = ("metrics.rank", *(f"metrics.{name}" for name in ERRORS))
SOURCES = ("metrics.retest_ape_pct", "metrics.rows", "tags.training", "attributes.Dataset")
OPS: Mapping[str, View] = {
    FIRST: View(
        title="Best learner of each family, newest training first",
        columns=(
            "tags.family",
            "tags.learner",
            "tags.runner_up",
            "metrics.median_ape_pct",
            "metrics.retest_ape_pct",
            "metrics.change_pct",
            "metrics.p90_ape_pct",
            "metrics.mape_pct",
            "metrics.bias_pct",
            "metrics.rows",
            "tags.training",
            "attributes.Dataset",
        ),
        where="metrics.rank = 1",
        order_by="tags.family",
        charts=ERRORS[:2],
    ),
    "all-learners": View(
        title="All learners, by family",
        columns=("tags.family", "tags.learner", *SCORES, *SOURCES, "attributes.Models"),
        where="metrics.rank > 0",
        order_by="tags.family",
        charts=ERRORS[:2],
    ),
    "shipped": View(
        title="What ships: the blend, and whether it got better",
        columns=("tags.family", *SCORES, "metrics.change_pct", "tags.champion", *SOURCES),
        where="tags.learner = 'blend'",
        order_by="tags.family",
        charts=ERRORS[:2],
    ),
}
ITERATIONS: Mapping[str, View] = {
    FIRST: View(
        title="Whole iterations, newest first",
        columns=(
            "tags.learner",
            "tags.device",
            *(f"metrics.{name}" for name in ("geomean_ape_pct", *ERRORS)),
            "metrics.noise_floor_pct",
            "metrics.cases",
        ),
        order_by="attributes.start_time",
        ascending=False,
        charts=("geomean_ape_pct", "p90_ape_pct"),
    )
}
PUBLIC: Mapping[str, View] = {
    FIRST: View(
        title="Published measurements, by line",
        columns=("tags.line", "tags.part", "tags.learner", *(f"metrics.{name}" for name in ERRORS)),
        order_by="tags.line",
    )
}
