"""Op families, one file each; ``families()`` finds them."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from microbench.opcall import OpCall
from microbench.ops.family import Family


@cache
def families() -> dict[str, Family]:
    """Every family by name: each module of this package that defines ``FAMILY``."""
    found: dict[str, Family] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda i: i.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "FAMILY"):
            found[module.FAMILY.name] = module.FAMILY
    return found


def find_family(call: OpCall) -> tuple[Family | None, Any]:
    """The family that answers for a call, and its parameters; (None, None) where there is none."""
    for family in families().values():
        answer = family.answers.get(call.op)
        if answer is not None:
            params = answer(call)
            if params is not None:
                return family, params
    return None, None
