"""Errors about unknown names, with the known names that are like them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

MOST = 6  # names that an error lists
PLURALS = {"family": "families"}  # of kinds that ``itercast list`` knows; others take an s


def unknown(kind: str, name: str, known: Iterable[str], like: Sequence[str] = ()) -> ValueError:
    """A ValueError for an unknown name: it shows similar known names, and the command for all.

    ``kind``: of the thing named; ``like``: names to show, by default those that are spelled alike.
    """
    names = list(known)
    like = like or near(name, names)
    command = f"itercast list {PLURALS.get(kind, f'{kind}s')}"
    rest = f"; all {len(names)}: {command}" if len(names) > len(like) else ""
    return ValueError(f"unknown {kind} {name!r}; known: {', '.join(like)}{rest}")


def near(name: str, known: Iterable[str]) -> list[str]:
    """Known names to suggest: all if few, else those with ``name`` in them, else similar."""
    by_spelling = {_plain(known_name): known_name for known_name in known}
    if len(by_spelling) <= MOST:
        return list(by_spelling.values())
    plain = _plain(name)
    if containing := [spelling for spelling in by_spelling if plain and plain in spelling]:
        closest = get_close_matches(plain, containing, MOST, cutoff=0.0)
        return [by_spelling[spelling] for spelling in containing if spelling in closest]
    return [by_spelling[match] for match in get_close_matches(plain, by_spelling, 3, cutoff=0.0)]


def _plain(name: str) -> str:
    """A name without upper case, underscores and outer spaces: how names are compared."""
    return name.lower().replace("_", "-").strip()
