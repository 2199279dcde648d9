"""Errors of models in one line, with the line of the user's code that they come from."""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path

import torch

OUR_CODE = Path(__file__).parents[2]  # the package itercast


def is_own_error(exc: BaseException) -> bool:
    """Whether an error is our own message about the user's input, not one raised by a model."""
    last = traceback.extract_tb(exc.__traceback__)[-1]
    return isinstance(exc, ValueError) and last.filename.startswith(str(OUR_CODE))


def source_line(exc: BaseException) -> str:
    """The last file and line that is neither ours nor torch's, in brackets; or nothing."""
    frames = traceback.extract_tb(exc.__traceback__)
    own = f"{Path(torch.__file__).parent}{os.sep}", str(OUR_CODE)
    ours = (*own, "<frozen importlib", f"{Path(importlib.__file__).parent}{os.sep}")
    users = [f for f in frames if not f.filename.startswith(ours)]
    return f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""


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
