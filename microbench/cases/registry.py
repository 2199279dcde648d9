"""All cases by name; importable without torch."""

from __future__ import annotations

from microbench.cases.catalogue import MEASURED, PUBLISHED
from microbench.cases.evalcase import EvalCase
from microbench.cases.examples import EXAMPLES
from microbench.cases.gpu import GPU
from microbench.cases.others import OTHERS
from microbench.cases.recommenders.catalogue import RECOMMENDERS
from microbench.hardware.nearest_names import unknown

__all__ = ["EvalCase", "case", "case_names"]

ALL = (*MEASURED, *PUBLISHED, *EXAMPLES, *GPU, *OTHERS, *RECOMMENDERS)


def case_names() -> list[str]:
    """The names of all cases, as ``itercast list cases`` prints them."""
    return [c.name for c in ALL]


def case(name: str) -> EvalCase:
    """The case of this name; ValueError lists those most like it."""
    for candidate in ALL:
        if candidate.name == name:
            return candidate
    raise unknown("case", name, case_names())
