"""Processes that import everything anew, and so take assumed numbers as they are to be now."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import ParamSpec, TypeVar

from itercast.microbench.processes.child_processes import end_with_parent, ended_with_this

P = ParamSpec("P")
T = TypeVar("T")
WORKERS = 2


@contextmanager
def processes(most: int = WORKERS) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes, at most WORKERS; none outlives this process, or an error in the block."""
    pool = ProcessPoolExecutor(
        min(WORKERS, most), get_context("spawn"), initializer=_begin, initargs=(ended_with_this(),)
    )
    try:
        yield pool
    except BaseException:
        for worker in active_children():
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: Mapping[str, str]) -> None:
    os.environ |= parent
    end_with_parent()


def in_new_process(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """What a function returns in a fresh process."""
    with processes(1) as pool:
        return pool.submit(call, *args, **options).result()
