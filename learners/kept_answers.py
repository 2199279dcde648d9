"""Answers of a bundle's models kept on disk: asked again, they need neither models nor pandas.

They are kept under a digest of the question, the bundle's files, all code that decides them, and
what is switched off or left out. Not kept are those of a bundle without a digest, and of families
that other packages add, whose code may change unseen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from itercast.capture.base.assumptions import left_out
from itercast.capture.base.cache_folder import cache_folder, digest_of_code, installed, kept
from itercast.capture.base.switches import switched_off
from itercast.learners.bundle import Bundle
from itercast.microbench.ops import families

ROOT = Path(__file__).parents[1]
CODE = [ROOT / room for room in ("capture", "microbench", "learners", "compose/pricing", "extras")]
LIBRARIES = ("numpy", "pandas", "xgboost-cpu", "xgboost")


def kept_answer(bundle: Bundle, names: Iterable[str], question: Any, ask: Callable[[], Any]) -> Any:
    """The answer of ``ask``; from disk if these families were asked the same before.

    ``question``: all that the answer depends on beside bundle and code. Answers are plain values.
    """
    modules = [families()[name].features.__module__ for name in names if bundle.digest]
    if not modules or not all(module.startswith("itercast.") for module in modules):
        return ask()
    code = (digest_of_code(*CODE), *map(installed, LIBRARIES), switched_off(), left_out())
    key = hashlib.sha256(repr((bundle.digest, code, question)).encode()).hexdigest()[:24]
    return kept(cache_folder("prices") / f"{key}.json.gz", ask)
