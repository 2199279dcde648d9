"""Errors about unknown names, with the known names that are like them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

MOST = 6  # names that an error lists
PLURALS = {"family": "families"}  # of kinds that ``itercast list`` knows; others take an s


def unknown(
    kind: str, name: str, known: Iterable[str], all_in: str = "", like: Sequence[str] = ()
) -> ValueError:
    """An error with the known names that are like an unknown one, and where all of them are listed.

    ``all_in``: by default ``itercast list``; ``like``: by default those that are spelled like it.
    """
    names = list(known)
    like = like or near(name, names)
    place = all_in or f"itercast list {PLURALS.get(kind, f'{kind}s')}"
    rest = f"; all {len(names)}: {place}" if len(names) > len(like) else ""
    return ValueError(f"unknown {kind} {name!r}; known: {', '.join(like)}{rest}")


def near(name: str, known: Iterable[str]) -> list[str]:
    """All of a few names, else those that contain ``name``, else those spelled most like it."""
    by_spelling = {_plain(one): one for one in known}
    if len(by_spelling) <= MOST:
        return list(by_spelling.values())
    plain = _plain(name)
    within = [one for one in by_spelling if plain and plain in one]
    like = get_close_matches(plain, within or by_spelling, MOST if within else 3, cutoff=0.0)
    return [by_spelling[one] for one in (by_spelling if within else like) if one in like]


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").strip()
