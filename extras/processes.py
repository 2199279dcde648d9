"""Processes that import everything anew, and so take assumed numbers as they are to be now."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
WORKERS = 2


def processes(most: int = WORKERS) -> ProcessPoolExecutor:
    """Fresh processes, at most WORKERS."""
    return ProcessPoolExecutor(min(WORKERS, most), mp_context=get_context("spawn"))


def in_new_process(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """What a function returns in a fresh process."""
    with processes(1) as pool:
        return pool.submit(call, *args, **options).result()
