"""What programs show on a terminal: progress bars, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer
from rich.console import Console
from rich.progress import Progress


def progress_bar() -> Progress:
    """A progress bar on stderr, so that --json output on stdout stays clean."""
    return Progress(console=Console(stderr=True))


def run_or_say(run: Callable[[], None]) -> None:
    """Run a function; an error ends the process with one line on stderr and exit code 2."""
    try:
        run()
    except (RuntimeError, ValueError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        sys.exit(2)


def run_program(main: Callable[..., None]) -> None:
    """Run a function by the words of the command line; an error is one line and exit code 2."""
    run_or_say(lambda: typer.run(main))
