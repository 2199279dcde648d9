"""Work that makes millions of objects and few cycles: imports, captures and searches."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside the context, or the function that it decorates, Python looks for no cycles of objects.

    Looking for them took an eighth of a plan search, a fifth of a long capture, and a fifth of
    importing torch and pandas. What was made inside counts as old afterwards: the next look at new
    objects does not go through all of it at once.
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
