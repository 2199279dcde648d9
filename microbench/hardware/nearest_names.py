"""Says in one line which names are like one that is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def unknown(kind: str, name: str, known: Sequence[str]) -> ValueError:
    """An error that lists the known names of a kind that are most like ``name``.

    ``kind`` is a word whose plural ``itercast list`` knows: case, gpu.
    """
    like = get_close_matches(name, known, cutoff=0.0)
    rest = f"; all {len(known)}: itercast list {kind}s" if len(known) > len(like) else ""
    return ValueError(f"unknown {kind} {name!r}; known: {', '.join(like)}{rest}")
