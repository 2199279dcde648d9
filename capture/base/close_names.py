"""Errors about unknown names, with the known names that are like them."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def unknown(kind: str, name: str, known: Sequence[str]) -> ValueError:
    """An error with the known names that contain ``name``, else with those spelled most like it.

    ``kind`` is a word whose plural ``itercast list`` knows: case, gpu.
    """
    lower = name.lower().replace("_", "-").strip()
    like = [k for k in known if lower and lower in k]
    like = like or get_close_matches(lower, known, cutoff=0.0)
    rest = f"; all {len(known)}: itercast list {kind}s" if len(known) > len(like) else ""
    return ValueError(f"unknown {kind} {name!r}; known: {', '.join(like)}{rest}")
