"""Keep optional packages that are slow to import, and not needed, from being imported."""

from __future__ import annotations

import sys


def without_scikit_learn() -> None:
    """Make scikit-learn look uninstalled, as xgboost and transformers import it where they find it.

    The import takes 1.5 s, and no code of this project needs it.
    """
    sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]
