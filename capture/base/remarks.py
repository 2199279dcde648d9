"""Remarks on a capture, repeated by its forecasts: what was left out or differs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_open: list[list[str]] = []


@contextmanager
def remarks() -> Iterator[list[str]]:
    """Collects the remarks made inside the context, each once."""
    _open.append([])
    try:
        yield _open[-1]
    finally:
        _open.pop()


def remark(text: str) -> None:
    """Make a remark on what is being captured."""
    if _open and text not in _open[-1]:
        _open[-1].append(text)
