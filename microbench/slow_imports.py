"""Packages that are slow to import and that nothing here uses."""

from __future__ import annotations

import sys


def without_scikit_learn() -> None:
    """Hide scikit-learn from imports: xgboost and transformers load it where they find it.

    That takes 1.5 s and nothing here uses it.
    """
    sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]
