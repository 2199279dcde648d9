"""Packages that are slow to import: they wait until they are used, scikit-learn is left out.

``from itercast.capture.base.slow_imports import torch`` imports nothing yet. Formulas, names and
readers of files do without torch, also where it is not installed; forecasts whose captures and
prices are kept do without torch, pandas and xgboost. What a script imports later is changed as soon
as it is there (``once_imported``).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from itercast.capture.base.garbage import without_garbage_collection

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    import torch.distributed as dist
    import xgboost as xgb

__all__ = ["dist", "once_imported", "pa", "pd", "pq", "torch", "without_scikit_learn", "xgb"]


class LazyModule:
    """A module that is imported when one of its names is first asked for."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        with without_scikit_learn(), without_garbage_collection():
            module = importlib.import_module(self.__name__)
        if self.__name__ == "xgboost":
            atexit.register(_free_trees)
        self.__dict__ = module.__dict__  # the same, so that timed calls take no longer
        return getattr(module, name)


def _free_trees() -> None:
    """Free xgboost's trees and tables at exit, while its library is loaded.

    Python clears modules in reverse order of import when it ends: xgboost before ours, whose caches
    hold bundles, and freeing a tree would then fail.
    """
    kinds = (xgb.Booster, xgb.DMatrix)
    for value in gc.get_objects():
        if issubclass(type(value), kinds):
            value.__del__()


if not TYPE_CHECKING:
    torch, dist = LazyModule("torch"), LazyModule("torch.distributed")
    pd, xgb = LazyModule("pandas"), LazyModule("xgboost")
    pa, pq = LazyModule("pyarrow"), LazyModule("pyarrow.parquet")


@contextmanager
def without_scikit_learn() -> Iterator[None]:
    """Let imports of scikit-learn fail inside the context, unless it is imported already.

    xgboost and transformers import it where they find it, which takes 1.5 s, and no forecast needs
    it. Afterwards it can be imported as ever.
    """
    if "sklearn" in sys.modules:
        yield
        return
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["sklearn"]


@contextmanager
def once_imported(name: str, act: Callable[[Any], None]) -> Iterator[None]:
    """Call ``act`` with the module of this name: now, or when the program imports it."""
    if name in sys.modules:
        act(sys.modules[name])
        yield
        return

    class Finder:
        @staticmethod
        def find_spec(module_name: str, path: Any = None, target: Any = None) -> Any:
            spec = PathFinder.find_spec(module_name, path) if module_name == name else None
            loader: Any = spec and spec.loader
            if loader:
                loader.exec_module = partial(_load, loader.exec_module, act)
            return spec

    finder: Any = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _load(load: Callable[[Any], None], act: Callable[[Any], None], module: Any) -> None:
    """Run a module's code, then call ``act`` with it."""
    load(module)
    act(module)
