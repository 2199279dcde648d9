"""Runs the programs of extras that are no commands of ``itercast``: errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

UsageError: Any = typer.BadParameter.__base__  # click's, which typer keeps under varying names


def run_program(main: Callable[..., None]) -> None:
    """Run a function by the words of the command line; an error is one line and exit code 2."""
    program = typer.Typer(add_completion=False)
    program.command()(main)
    try:
        sys.exit(program(standalone_mode=False))
    except UsageError as exc:
        told = exc.format_message()
    except (RuntimeError, ValueError, OSError) as exc:
        told = str(exc)
    print(f"error: {told}", file=sys.stderr)
    sys.exit(2)
