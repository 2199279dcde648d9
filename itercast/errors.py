"""Report bad input as one line on stderr and exit code 2."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer
from typer.core import TyperGroup

P = ParamSpec("P")
R = TypeVar("R")
UsageError: Any = typer.BadParameter.__base__  # click's, which typer keeps under varying names


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorate a command so that ValueError and OSError end it with one line and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (ValueError, OSError) as exc:
            typer.echo(f"itercast: {str(exc).splitlines()[0] if str(exc) else repr(exc)}", err=True)
            raise typer.Exit(2) from exc

    return wrapped


def _given(exc: Exception) -> str:
    """The value of an option that typer's checks (by pydantic) refuse and do not name."""
    checks: Any = getattr(exc.__cause__, "errors", None)
    return f", got {checks()[0]['input']!r}" if checks else ""


class OneLineGroup(TyperGroup):
    """Commands whose wrong options end with one line and exit code 2."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command that the arguments name, and leave with its exit code."""
        if not options.get("standalone_mode", True):
            return super().main(*args, **options)
        try:
            sys.exit(super().main(*args, **{**options, "standalone_mode": False}) or 0)
        except UsageError as exc:
            if told := exc.format_message().rstrip():  # empty where the help was printed
                typer.echo(f"itercast: {told}{_given(exc)}", err=True)
            sys.exit(2)
        except typer.Abort:
            typer.echo("itercast: stopped", err=True)
            sys.exit(1)
