"""Keep an optional package that is slow to import, and not needed, from being imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
