"""Op families, one file each; ``families()`` finds them."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from microbench.opcall import OpCall
from microbench.ops.family import Family

MAX_FOUND = 2**16
_found: dict[int, tuple[OpCall, Family | None, Any]] = {}  # by identity: calls never change


@cache
def families() -> dict[str, Family]:
    """Every family by name: each module of this package that defines ``FAMILY``."""
    found: dict[str, Family] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda i: i.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "FAMILY"):
            found[module.FAMILY.name] = module.FAMILY
    return found


@cache
def _answering() -> dict[str, list[Family]]:
    """The families that answer for each op."""
    found: dict[str, list[Family]] = {}
    for family in families().values():
        for op in family.answers:
            found.setdefault(op, []).append(family)
    return found


def find_family(call: OpCall) -> tuple[Family | None, Any]:
    """The family that answers for a call, and its parameters; (None, None) where there is none."""
    known = _found.get(id(call))
    if known is None or known[0] is not call:
        if len(_found) >= MAX_FOUND:
            _found.clear()
        known = _found[id(call)] = (call, *_find(call))
    return known[1], known[2]


def _find(call: OpCall) -> tuple[Family | None, Any]:
    for family in _answering().get(call.op, ()):
        params = family.answers[call.op](call)
        if params is not None:
            return family, params
    return None, None
