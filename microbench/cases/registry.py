"""All cases by name; importable without torch."""

from __future__ import annotations

from itercast.microbench.cases.catalogue import MEASURED, PUBLISHED
from itercast.microbench.cases.evalcase import EvalCase
from itercast.microbench.cases.examples import EXAMPLES
from itercast.microbench.cases.gpu import GPU
from itercast.microbench.cases.others import OTHERS
from itercast.microbench.cases.recommenders.catalogue import RECOMMENDERS
from itercast.microbench.hardware.nearest_names import unknown

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
