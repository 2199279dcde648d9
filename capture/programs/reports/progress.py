"""Says on stderr, now and then, what a running script does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

PROGRESS = "itercast> "  # begins its lines among the script's
EVERY_S = 0.5  # no assumption: seconds between two lines


@contextmanager
def printed_progress(doing: Callable[[FrameType], str]) -> Iterator[None]:
    """Print what the script does every ``EVERY_S`` seconds, from another thread.

    ``doing`` makes the text of the frame that this thread runs.
    """
    thread, ended = threading.get_ident(), threading.Event()

    def print_often() -> None:
        while not ended.is_set():
            _print(doing(sys._current_frames()[thread]))
            ended.wait(EVERY_S)
        _print("")

    printing = threading.Thread(target=print_often, daemon=True)
    printing.start()
    try:
        yield
    finally:
        ended.set()
        printing.join()


def _print(text: str) -> None:
    """Print a line to stderr that begins with ``PROGRESS``, by which our parent finds it."""
    with suppress(OSError, ValueError):  # the script closed it
        print(f"\n{PROGRESS}{text}", file=sys.__stderr__, flush=True)
