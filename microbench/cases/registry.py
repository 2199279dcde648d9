"""The cases we forecast and measure, by name; importable without torch."""

from __future__ import annotations

from microbench.cases.catalogue import MEASURED, PUBLISHED
from microbench.cases.evalcase import EvalCase
from microbench.cases.examples import EXAMPLES
from microbench.cases.gpu import GPU
from microbench.cases.others import OTHERS

__all__ = ["EvalCase", "case", "case_names"]

ALL = (*MEASURED, *PUBLISHED, *EXAMPLES, *GPU, *OTHERS)


def case_names() -> list[str]:
    """Names of all cases."""
    return [c.name for c in ALL]


def case(name: str) -> EvalCase:
    """The case of that name."""
    for one in ALL:
        if one.name == name:
            return one
    raise ValueError(f"unknown case {name!r}; known: {', '.join(case_names())}")
