"""Op families, one file each, in four rooms; ``families()`` finds them."""

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
    """Every family by name: each module below this package that defines ``FAMILY``."""
    modules = [
        importlib.import_module(i.name) for i in pkgutil.walk_packages(__path__, f"{__name__}.")
    ]
    found: list[Family] = [m.FAMILY for m in modules if hasattr(m, "FAMILY")]
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


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
