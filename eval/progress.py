"""Progress bars on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress


def progress_bar() -> Progress:
    """A progress bar on stderr, so that --json output on stdout stays clean."""
    return Progress(console=Console(stderr=True))
