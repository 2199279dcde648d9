"""Says on stderr, now and then, what a running script does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

DOING = "itercast> "  # begins its lines among the script's
EVERY_S = 0.5  # no assumption: seconds between two lines


@contextmanager
def said(words: Callable[[FrameType], str]) -> Iterator[None]:
    """Say ``words``, made of the frame that runs, from another thread, inside the context alone."""
    thread, ended = threading.get_ident(), threading.Event()

    def say() -> None:
        while not ended.is_set():
            _print(words(sys._current_frames()[thread]))
            ended.wait(EVERY_S)
        _print("")

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    try:
        yield
    finally:
        ended.set()
        saying.join()


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # the script closed it
        print(f"\n{DOING}{text}", file=sys.__stderr__, flush=True)
