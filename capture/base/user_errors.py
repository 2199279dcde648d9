"""One-line errors that name the line of the user's code, and which way a user's checks of data
pass.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import traceback
from functools import cache
from pathlib import Path

import torch

OUR_CODE = Path(__file__).parents[2]  # the package itercast
QUOTED = re.compile(r"(?m)^  .*\n(\S.*)")  # first lines of errors in tracebacks
LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", str(OUR_CODE))


def is_own_error(exc: BaseException) -> bool:
    """Whether an error is our own message about the user's input, not one raised by a model."""
    last = traceback.extract_tb(exc.__traceback__)[-1]
    return isinstance(exc, ValueError) and last.filename.startswith(str(OUR_CODE))


def source_line(exc: BaseException) -> str:
    """`` (FILE:LINE)`` of the user's code where an error arose; "" if only libraries ran."""
    frames = traceback.extract_tb(exc.__traceback__)
    libraries = (*LIBRARIES, "<frozen importlib")
    users = [
        f for f in frames if not f.filename.startswith(libraries) and not _of_python(f.filename)
    ]
    return f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""


def _of_python(file: str) -> bool:
    """Whether a file is of Python's own library, in whose folder packages may lie, too."""
    return file.startswith(f"{Path(os.__file__).parent}{os.sep}") and "-packages" not in file


def user_line() -> tuple[str, int, int]:
    """File, line and bytecode offset of the user's code that runs now: the innermost frame of it.

    Frames of this package and of torch are skipped. The offset tells apart conditions that are on
    one line, such as the two of ``a and b``.
    """
    for frame, line in traceback.walk_stack(None):
        if not frame.f_code.co_filename.startswith((*LIBRARIES, "<")):
            return frame.f_code.co_filename, line, frame.f_lasti
    return "", 0, 0


def one_line_error(exc: BaseException) -> str:
    """An error's class and first line, with the file and line of the user's code it came from."""
    return f"{first_line(exc)}{source_line(exc)}"


def first_line(exc: BaseException) -> str:
    """An error as one line: class and first line, then ", because of" and its cause likewise.

    The cause is the error that it was raised from, or raised while handling (clean-up may fail
    again). If the text quotes a worker's traceback, the first lines of the errors in that follow.
    """
    text = str(exc).strip()
    errors = QUOTED.findall(text) if "Traceback (most recent" in text else []
    line = f"{type(exc).__name__}: {(text.splitlines() or [''])[0]}"
    line = " ".join(filter(None, (line, ", because of ".join(errors[::-1]))))
    cause = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)
    if cause is None or str(cause) in line:
        return line
    return f"{line}, because of {first_line(cause)}"


def passing(file: str, line: int) -> bool | None:
    """The truth value that lets the user's check in this line of a file pass.

    A check is an ``assert``, or an ``if`` that does nothing but raise. Where a condition depends on
    a tensor without data, this value is assumed, so that the check does not fail. None where there
    is no check in the line, or where its conditions need different values.
    """
    needed = set[bool]()
    for check in _conditions(file):
        if isinstance(check, ast.While):
            continue
        if check.test.lineno <= line <= (check.test.end_lineno or 0):
            test_passes = isinstance(check, ast.Assert)  # an ``if`` passes where its test is false
            operators = [getattr(leaf, "op", None) for leaf in _leaves(check.test)]
            needed |= {test_passes != isinstance(op, ast.Not) for op in operators}
    return needed.pop() if len(needed) == 1 else None


def loop_test(file: str, line: int) -> int:
    """The line where a test of a ``while`` begins that this line belongs to; else this line."""
    tests = [node.test for node in _conditions(file) if isinstance(node, ast.While)]
    return next((t.lineno for t in tests if t.lineno <= line <= (t.end_lineno or 0)), line)


@cache
def _conditions(file: str) -> list[ast.Assert | ast.If | ast.While]:
    """The checks in a file of Python, ``assert`` and ``if`` that only raises, and its loops."""
    return [
        node
        for node in ast.walk(syntax_tree(file))
        if isinstance(node, ast.Assert | ast.While)
        or (isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise) and not node.orelse)
    ]


@cache
def syntax_tree(file: str) -> ast.Module:
    """The syntax tree of a file, empty for one that is no Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _leaves(test: ast.expr) -> list[ast.expr]:
    """The conditions that a test joins by ``and`` or ``or``."""
    if not isinstance(test, ast.BoolOp):
        return [test]
    return [leaf for operand in test.values for leaf in _leaves(operand)]
