"""All cases by name, those of other packages too; importable without torch."""

from __future__ import annotations

from functools import cache

from itercast.microbench.cases.catalogue import MEASURED, PUBLISHED
from itercast.microbench.cases.evalcase import EvalCase
from itercast.microbench.cases.examples import EXAMPLES
from itercast.microbench.cases.gpu import GPU
from itercast.microbench.cases.others import OTHERS
from itercast.microbench.cases.recommenders.catalogue import RECOMMENDERS
from itercast.microbench.extensions import with_added
from itercast.microbench.hardware.nearest_names import unknown

__all__ = ["EvalCase", "case", "case_names"]

OWN = (*MEASURED, *PUBLISHED, *EXAMPLES, *GPU, *OTHERS, *RECOMMENDERS)


@cache
def _cases() -> dict[str, EvalCase]:
    return with_added("cases", {c.name: c for c in OWN}, EvalCase)


def case_names() -> list[str]:
    """The names of all cases, as ``itercast list cases`` prints them."""
    return list(_cases())


def case(name: str) -> EvalCase:
    """The case of this name; ValueError lists those most like it."""
    if name not in _cases():
        raise unknown("case", name, case_names())
    return _cases()[name]
