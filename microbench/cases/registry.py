"""The cases we forecast and measure, by name; importable without torch."""

from __future__ import annotations

from microbench.cases.catalogue import MEASURED, PUBLISHED
from microbench.cases.evalcase import EvalCase
from microbench.cases.gpu import GPU
from microbench.cases.others import OTHERS

__all__ = ["EvalCase", "case", "case_names"]


def case_names() -> list[str]:
    """Names of all cases."""
    return [c.name for c in (*MEASURED, *PUBLISHED, *GPU, *OTHERS)]


def case(name: str) -> EvalCase:
    """The case of that name."""
    for one in (*MEASURED, *PUBLISHED, *GPU, *OTHERS):
        if one.name == name:
            return one
    raise ValueError(f"unknown case {name!r}; known: {', '.join(case_names())}")
