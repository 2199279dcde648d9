"""What programs show on a terminal: progress bars, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer
from rich.console import Console
from rich.progress import Progress


def progress_bar() -> Progress:
    """A progress bar on stderr, so that --json on stdout stays clean; on terminals only."""
    console = Console(stderr=True)
    return Progress(console=console, disable=not console.is_terminal)


def run_program(main: Callable[..., None]) -> None:
    """Run a function by the words of the command line; an error is one line and exit code 2."""
    try:
        typer.run(main)
    except (RuntimeError, ValueError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        sys.exit(2)
