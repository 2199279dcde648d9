"""Op families, one file each; ``families()`` finds them."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

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
