"""Finds op families, in the folders here and in other packages, and the family of a captured
call.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Hashable
from functools import cache

from itercast.capture.base.extensions import with_added
from itercast.capture.opcall import Argument, OpCall, TensorSpec
from itercast.microbench.ops.family import Family, Point

MAX_FOUND = 2**16
FEW_TENSORS = 8  # of a call that others may be like; calls on lists of tensors have more
Described = tuple[Family | None, Point]  # the family of a call and its parameters, or None twice
_by_call: dict[int, tuple[OpCall, Described]] = {}  # by identity: calls never change
_by_values: dict[Hashable, Described] = {}  # by op, arguments and outputs without their places


@cache
def families() -> dict[str, Family]:
    """All families by name: of modules below this package that define ``FAMILY``, and added ones.

    Modules whose name starts with an underscore hold no family and may need torch.
    """
    names = [i.name for i in pkgutil.walk_packages(__path__, f"{__name__}.")]
    modules = [importlib.import_module(n) for n in names if "._" not in n]
    own: list[Family] = [m.FAMILY for m in modules if hasattr(m, "FAMILY")]
    by_name = with_added("families", {family.name: family for family in own}, Family)
    return dict(sorted(by_name.items()))


@cache
def _answering() -> dict[str, list[Family]]:
    """The families that can describe calls of each op, by the op's name."""
    by_op: dict[str, list[Family]] = {}
    for family in families().values():
        for op in family.answers:
            by_op.setdefault(op, []).append(family)
    return by_op


@cache
def _by_params() -> dict[type[Point], Family]:
    return {family.params: family for family in families().values()}


def family_of(params: Point) -> Family | None:
    """The family whose parameters these are; None for other values."""
    return _by_params().get(type(params))


def find_family(call: OpCall) -> Described:
    """The family that describes a call, and the call's parameters; (None, None) where none does.

    Neither depends on where in memory the call's tensors lie.
    """
    answer = _by_call.get(id(call))
    if answer is None or answer[0] is not call:
        if max(len(_by_call), len(_by_values)) >= MAX_FOUND:
            _by_call.clear()
            _by_values.clear()
        hashes_fast = len(call.tensors()) <= FEW_TENSORS
        answer = _by_call[id(call)] = (call, _find_alike(call) if hashes_fast else _find(call))
    return answer[1]


def _find_alike(call: OpCall) -> Described:
    """As ``_find``; the answer is kept for calls that differ only in where tensors lie."""
    values = (call.args, tuple(call.kwargs.items()), call.outputs)
    key = (call.op, _without_places(values))
    try:
        if key not in _by_values:
            _by_values[key] = _find(call)
    except TypeError:  # an argument that cannot be hashed
        return _find(call)
    return _by_values[key]


def _without_places(value: Argument) -> Argument:
    """An argument without the places of its tensors in memory, to compare calls by."""
    if isinstance(value, TensorSpec):
        return value.shape, value.dtype, value.stride, value.zero_frac, value.layout, value.nnz
    return tuple(map(_without_places, value)) if isinstance(value, tuple) else value


def _find(call: OpCall) -> Described:
    """The first family that answers for a call, with the call's parameters."""
    layouts = {t.layout for t in call.tensors() if t.layout} or {""}
    for family in _answering().get(call.op, ()):
        if not layouts.issubset(family.layouts):
            continue
        params = family.answers[call.op](call)
        if params is not None:
            return family, params
    return None, None
