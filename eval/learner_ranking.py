"""Tables of learners: errors per op family, in narrow columns for terminals of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from itercast.eval.tables import headed
from itercast.learners.models.compared import NAMES

HEADS = {  # in two lines, so that all columns fit; other names stand as they are
    "xgboost-physics": "xgb\nphysics",
    "nearest": "near-\nest",
    "roofline": "roof-\nline",
}
WHOLE_PCT = 99.95  # from here on without decimals
BEST_RANK = 1  # of all learners whose errors differ from the smallest by no more than the noise
Scores = Mapping[str, Mapping[str, float]]  # by learner: errors in % and ``rank``


def learner_table(
    lines: Sequence[tuple[str, Sequence[str], Scores]], facts: Sequence[str] = ()
) -> Table:
    """A line per family with its facts and errors in %, and a column per learner, the blend first.

    ``lines``: family, its facts as text, its scores. ``facts``: headings of these facts.
    Bold are the learners that no other is better than beyond the noise: one, or several that tie.
    """
    learners = [n for n in reversed(NAMES) if any(n in scores for _, _, scores in lines)]
    title = "median absolute error on held-out shapes, %; bold: none is better beyond the noise"
    heads = ("family", *facts, *(HEADS.get(name, name) for name in learners))
    look = {"box": box.SIMPLE_HEAD, "padding": 0, "show_edge": False}
    table = headed(title, *heads, texts=("family",), **look)
    for family, texts, scores in lines:
        table.add_row(family, *texts, *(cell(scores.get(name)) for name in learners))
    return table


def cell(score: Mapping[str, float] | None) -> Text:
    """A learner's median error in three digits or more (8.8, 51.3, 313), bold if none is better."""
    if score is None:
        return Text("-")
    pct = score["median_ape_pct"]
    text = f"{pct:.0f}" if pct >= WHOLE_PCT else f"{pct:.1f}"
    return Text(text, "bold" if score.get("rank") == BEST_RANK else "")
