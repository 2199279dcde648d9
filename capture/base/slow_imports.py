"""Packages that are slow to import: torch waits until it is used, scikit-learn is left out.

``from itercast.capture.base.slow_imports import torch`` imports nothing yet. Formulas, names and
readers of files do without torch, also where it is not installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["dist", "torch", "without_scikit_learn"]


class LazyModule:
    """A module that is imported when one of its names is first asked for."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)
        self.__dict__ = module.__dict__  # the same, so that timed calls take no longer
        return getattr(module, name)


if not TYPE_CHECKING:
    torch, dist = LazyModule("torch"), LazyModule("torch.distributed")


@contextmanager
def without_scikit_learn() -> Iterator[None]:
    """Inside the context xgboost and transformers do without scikit-learn, if it is not there yet.

    Both import it where they find it, which takes 1.5 s, and no forecast needs it. Afterwards it
    can be imported as ever.
    """
    if "sklearn" in sys.modules:
        yield
        return
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["sklearn"]
