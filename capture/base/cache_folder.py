"""Where captures and other things that can be made again are kept: the platform's cache folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "ITERCAST_CACHE"  # environment variable that names another folder


def cache_folder(name: str) -> Path:
    """The folder of this name in $ITERCAST_CACHE, else in the platform's cache folder."""
    if own := os.environ.get(VARIABLE):
        return Path(own) / name
    return _platform_folder() / "itercast" / name


def _platform_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
