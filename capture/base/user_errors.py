"""Errors in one line, with the line of the user's code that they come from; its checks of data."""

from __future__ import annotations

import ast
import linecache
import os
import traceback
from functools import cache
from pathlib import Path

import torch

OUR_CODE = Path(__file__).parents[2]  # the package itercast


def is_own_error(exc: BaseException) -> bool:
    """Whether an error is our own message about the user's input, not one raised by a model."""
    last = traceback.extract_tb(exc.__traceback__)[-1]
    return isinstance(exc, ValueError) and last.filename.startswith(str(OUR_CODE))


def source_line(exc: BaseException) -> str:
    """The last file and line not of ours, torch's or Python's, in brackets; or nothing."""
    frames = traceback.extract_tb(exc.__traceback__)
    own = f"{Path(torch.__file__).parent}{os.sep}", str(OUR_CODE)
    ours = (*own, "<frozen importlib")
    users = [f for f in frames if not f.filename.startswith(ours) and not _of_python(f.filename)]
    return f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""


def _of_python(file: str) -> bool:
    """Whether a file is of Python's own library, in whose folder packages may lie, too."""
    return file.startswith(f"{Path(os.__file__).parent}{os.sep}") and "-packages" not in file


def user_line() -> tuple[str, int]:
    """The innermost file and line that runs now and is neither ours nor torch's."""
    ours = (f"{Path(torch.__file__).parent}{os.sep}", str(OUR_CODE), "<")
    for frame, line in traceback.walk_stack(None):
        if not frame.f_code.co_filename.startswith(ours):
            return frame.f_code.co_filename, line
    return "", 0


def one_line_error(exc: BaseException) -> str:
    """An error's class and first line, with the file and line of the user's code it came from."""
    return f"{first_line(exc)}{source_line(exc)}"


def first_line(exc: BaseException) -> str:
    """An error's class and first line, and those of the errors that it was raised from.

    One that quotes the traceback of a worker's process has that one's last line, too.
    """
    first, *others = str(exc).strip().splitlines() or [""]
    worker = f" {others[-1]}" if any("Traceback (most recent" in line for line in others) else ""
    told = f"{type(exc).__name__}: {first}{worker}"
    if exc.__cause__ is None or str(exc.__cause__) in told:
        return told
    return f"{told}, because of {first_line(exc.__cause__)}"


def passing(file: str, line: int) -> bool | None:
    """What a condition that is read in a line is where its check passes; None where none is made,
    or several that differ.

    A check is an ``assert``, or an ``if`` that does nothing but raise.
    """
    needed = set[bool]()
    for check in _checks(file):
        if check.test.lineno <= line <= (check.test.end_lineno or 0):
            passes = isinstance(check, ast.Assert)
            needed |= {passes == _wanted(leaf) for leaf in _leaves(check.test)}
    return needed.pop() if len(needed) == 1 else None


@cache
def _checks(file: str) -> list[ast.Assert | ast.If]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Assert | ast.If)]
    return [node for node in found if isinstance(node, ast.Assert) or _raises(node)]


def _raises(node: ast.If) -> bool:
    return isinstance(node.body[-1], ast.Raise) and not node.orelse


def _leaves(test: ast.expr) -> list[ast.expr]:
    """The conditions that a test joins by ``and`` or ``or``."""
    joined = test.values if isinstance(test, ast.BoolOp) else []
    return [leaf for one in joined for leaf in _leaves(one)] or [test]


def _wanted(condition: ast.expr) -> bool:
    """Whether a condition holds where what is in it does."""
    return not (isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not))
