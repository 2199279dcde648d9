"""Finds the op families, in the folders here and in other packages, and a captured call's one."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from itercast.capture.base.extensions import with_added
from itercast.capture.opcall import OpCall
from itercast.microbench.ops.family import Family, Point

MAX_FOUND = 2**16
_found: dict[int, tuple[OpCall, Family | None, Point]] = {}  # by identity: calls never change


@cache
def families() -> dict[str, Family]:
    """All families by name: of modules below this package that define ``FAMILY``, and added ones.

    Modules whose name starts with an underscore hold no family and may need torch.
    """
    names = [i.name for i in pkgutil.walk_packages(__path__, f"{__name__}.")]
    modules = [importlib.import_module(n) for n in names if "._" not in n]
    own: list[Family] = [m.FAMILY for m in modules if hasattr(m, "FAMILY")]
    found = with_added("families", {family.name: family for family in own}, Family)
    return dict(sorted(found.items()))


@cache
def _answering() -> dict[str, list[Family]]:
    """The families that can describe calls of each op, by the op's name."""
    found: dict[str, list[Family]] = {}
    for family in families().values():
        for op in family.answers:
            found.setdefault(op, []).append(family)
    return found


@cache
def _by_params() -> dict[type[Point], Family]:
    return {family.params: family for family in families().values()}


def family_of(params: Point) -> Family | None:
    """The family whose parameters these are; None for other values."""
    return _by_params().get(type(params))


def find_family(call: OpCall) -> tuple[Family | None, Point]:
    """The family that describes a call, and the call's parameters; (None, None) where none does."""
    known = _found.get(id(call))
    if known is None or known[0] is not call:
        if len(_found) >= MAX_FOUND:
            _found.clear()
        known = _found[id(call)] = (call, *_find(call))
    return known[1], known[2]


def _find(call: OpCall) -> tuple[Family | None, Point]:
    layouts = {t.layout for t in call.tensors() if t.layout} or {""}
    for family in _answering().get(call.op, ()):
        if not layouts.issubset(family.layouts):
            continue
        params = family.answers[call.op](call)
        if params is not None:
            return family, params
    return None, None
