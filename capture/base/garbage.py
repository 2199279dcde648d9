"""Work that makes millions of objects and few cycles: imports, captures and searches."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turn Python's collector of cycles off inside the context, or the decorated function.

    It took an eighth of a plan search, a fifth of a long capture, and a fifth of importing torch
    and pandas. Objects made inside are moved to the oldest generation at the end (freeze, then
    unfreeze), so that the next collection of young ones does not walk all of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.unfreeze()
            gc.enable()
