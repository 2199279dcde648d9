"""What each source of measured iterations is used for (roles.yaml), and errors by that use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from itercast.capture.base.yaml_text import facts_of
from itercast.eval.results import COVERAGE
from itercast.extras.published.lines import LineResult

ROLES: Mapping[str, Sequence[str]] = facts_of(__file__)  # sources by role, untouched ones first
FEW_PCT = 60.0  # no assumption: intervals that cover less of a source are counted in summaries
OPS = "single ops and parts of steps"


def role_of(source: str) -> str:
    """What a source of measured iterations is used for; ValueError for one that is not listed."""
    for role, sources in ROLES.items():
        if source.casefold() in {name.casefold() for name in sources}:
            return role
    known = sorted(name for sources in ROLES.values() for name in sources)
    raise ValueError(
        f"source {source!r} has no role in extras/published/roles.yaml; listed: {known}"
    )


def by_role(results: Sequence[LineResult], learner: str) -> dict[str, list[LineResult]]:
    """Results of left-out sources by their role, untouched ones first, then those of single ops."""
    found: dict[str, list[LineResult]] = {role: [] for role in (*ROLES, OPS)}
    for r in results:
        found[role_of(r.part) if COVERAGE in r.scores[learner] else OPS].append(r)
    return {role: mine for role, mine in found.items() if mine}


def summary(results: Sequence[LineResult], learner: str) -> str:
    """One line on the errors of several sources, each of which counts alike.

    A source that several lines are about counts by the mean over its lines' rows.
    """
    names = ("mape_pct", "bias_pct", COVERAGE)
    lines: dict[str, list[LineResult]] = {}
    for r in results:
        lines.setdefault(r.part, []).append(r)
    rows = {source: [r.rows for r in mine] for source, mine in lines.items()}
    mean, bias, covered = (
        np.array(
            [
                np.average([r.scores[learner][name] for r in mine], weights=rows[source])
                for source, mine in lines.items()
            ]
        )
        for name in names
    )
    few = int((covered < FEW_PCT).sum())
    return (
        f"{len(lines)} sources, {sum(map(sum, rows.values()))} rows: "
        f"mean of the sources' mean errors {mean.mean():.1f} %, bias {bias.mean():+.1f}, "
        f"80 % intervals cover {covered.mean():.0f} %, less than {FEW_PCT:.0f} % of {few} sources"
    )
