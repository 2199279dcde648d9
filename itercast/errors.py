"""Report bad input as one line on stderr and exit code 2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

P = ParamSpec("P")
R = TypeVar("R")


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
