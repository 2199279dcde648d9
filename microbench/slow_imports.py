"""Keep optional packages that are slow to import, and not needed, from being imported."""

from __future__ import annotations

import sys


def without_scikit_learn() -> None:
    """Make scikit-learn look uninstalled, so that xgboost and transformers do not import it.

    The import takes 1.5 s, and no code of this project needs it.
    """
    sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]
