"""Progress bars of long work."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress


def progress_bar() -> Progress:
    """On stderr, so that --json output stays clean."""
    return Progress(console=Console(stderr=True))
