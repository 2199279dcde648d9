"""Report bad input as one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

UsageError: Any = typer.BadParameter.__base__  # click's, which typer keeps under varying names

STOPPED = 130  # exit code of what Ctrl-C ended, in every shell


def _refused_value(exc: Exception) -> str:
    """The text `, got VALUE` for a value that pydantic refused: its message does not name it."""
    checks: Any = getattr(exc.__cause__, "errors", None)
    return f", got {checks()[0]['input']!r}" if checks else ""


def _first_line(exc: ValueError | OSError) -> str:
    """The first line of an error; if a file cannot be used, its name and the reason."""
    if isinstance(exc, OSError) and exc.filename and exc.strerror:
        return f"{str(exc.filename)!r}: {exc.strerror}"
    return str(exc).splitlines()[0] if str(exc) else repr(exc)


class OneLineGroup(TyperGroup):
    """Commands that end with one line and exit code 2 on wrong options, ValueError and OSError."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command that the arguments name, and leave with its exit code."""
        if not options.get("standalone_mode", True):
            return super().main(*args, **options)
        try:
            code = super().main(*args, **{**options, "standalone_mode": False}) or 0
            if code == STOPPED:  # typer prints nothing then
                raise typer.Abort
            sys.exit(code)
        except UsageError as exc:
            if message := exc.format_message().rstrip():  # empty where the help was printed
                hint = " itercast --help lists all." * message.startswith("No such command")
                typer.echo(f"itercast: {message}{_refused_value(exc)}{hint}", err=True)
            sys.exit(2)
        except (ValueError, OSError) as exc:
            typer.echo(f"itercast: {_first_line(exc)}", err=True)
            sys.exit(2)
        except typer.Abort as exc:
            typer.echo("; ".join(["itercast: stopped", *filter(None, [str(exc)])]), err=True)
            sys.exit(STOPPED)


def leave_if_failed(failed: int, cells: int) -> None:
    """Exit with code 1 where some cells of a table could not be forecast, 2 where all failed."""
    if failed:
        raise typer.Exit(1 if failed < cells else 2)


@contextmanager
def when_stopped(kept: str) -> Iterator[None]:
    """Where Ctrl-C ends what runs inside, end the command and print ``kept``: what was saved."""
    try:
        yield
    except (KeyboardInterrupt, typer.Abort):
        raise typer.Abort(kept) from None
