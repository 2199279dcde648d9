"""All cases by name, those of other packages too; importable without torch."""

from __future__ import annotations

from functools import cache

import numpy as np

from itercast.capture.base.close_names import unknown
from itercast.capture.base.extensions import with_added
from itercast.capture.cases.evalcase import EvalCase
from itercast.capture.cases.kinds import INPUTS, KINDS, Sizes, make_case, stated

__all__ = ["EvalCase", "case", "case_names", "cases_of"]

MEASURED = "measured"  # a group of the file
DLRMS = 20


@cache
def _groups() -> dict[str, tuple[EvalCase, ...]]:
    """The cases of ``cases.yaml``, and random DLRMs among those of group "gpu", by group."""
    groups = {
        group: tuple(_stated_case(name, group, facts) for name, facts in cases.items())
        for group, cases in stated().items()
        if group not in (KINDS, INPUTS)
    }
    return {**groups, "gpu": (*groups["gpu"], *map(random_dlrm, range(DLRMS)))}


def _stated_case(name: str, group: str, facts: Sizes) -> EvalCase:
    """The case that the file states under a name: arguments of ``make_case``, lists as tuples."""
    arguments: Sizes = {key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()}
    return make_case(name, measured=group == MEASURED, **arguments)


def random_dlrm(number: int) -> EvalCase:
    """A random DLRM; every second one has at least 20 lookups per bag.

    Perceptrons, 36 to 66 tables and batches of 512 to 4096 as in arXiv:2404.12674; tables of 1,000
    to a million rows, so that their dense gradients fit into memory.
    """
    rng = np.random.default_rng([2404, number])
    tables = int(rng.integers(36, 67))
    rows = np.exp(rng.uniform(np.log(1e3), np.log(1e6), tables)).astype(int)
    return make_case(
        f"dlrm-r{number:02d}",
        "dlrm",
        batch=int(rng.choice([512, 1024, 2048, 4096])),
        features=512,
        bottom=(1024, 256),
        tables=tables,
        rows=tuple(int(n) for n in rows),
        bag=int(rng.integers(20, 81) if number % 2 else rng.integers(1, 20)),
        width=int(rng.choice([32, 64, 128])),
        top=(1024, 512, 256),
    )


def cases_of(group: str) -> tuple[EvalCase, ...]:
    """The cases of a group of the file."""
    return _groups()[group]


@cache
def _cases() -> dict[str, EvalCase]:
    """All cases by name, with those that packages add."""
    own = {c.name: c for cases in _groups().values() for c in cases}
    return with_added("cases", own, EvalCase)


def case_names() -> list[str]:
    """The names of all cases, as ``itercast list cases`` prints them."""
    return list(_cases())


def case(name: str) -> EvalCase:
    """The case of this name; ValueError lists those most like it."""
    if name not in _cases():
        raise unknown("case", name, case_names())
    return _cases()[name]
