"""Streams and events of a captured program, which record what waits for what.

Code that runs on any device takes its streams from ``torch.cuda`` or ``torch.cpu``. While a program
is captured, both have the classes below: they do nothing but tell the log which stream ops are
launched on, and where one stream waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch

from itercast.microbench.programs.log import ProgramLog


class Streams:
    """The streams of one program: makes them, and knows the current one."""

    def __init__(self, log: ProgramLog) -> None:
        self.log = log
        self.numbers = count()
        # classes, which programs name in annotations; device and priority change nothing
        self.stream_class = type("Stream", (Stream,), {"streams": self})
        self.event_class = type("Event", (Event,), {"streams": self})
        self.default = self.current = self.stream_class()

    @contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        """Launch ops on ``stream`` inside the context; None changes nothing."""
        before = self.current
        self.select(stream or before)
        try:
            yield
        finally:
            self.select(before)

    def select(self, stream: Stream) -> None:
        """Launch ops on ``stream`` from now on."""
        self.current, self.log.stream = stream, stream.number

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for the current stream: others are awaited by the program itself."""
        self.current.synchronize()

    def namespace(self) -> dict[str, Any]:
        """The functions and classes to put into ``torch.cuda`` or ``torch.cpu``, by name."""
        return {
            "Stream": self.stream_class,
            "Event": self.event_class,
            "stream": self.use,
            "StreamContext": self.use,
            "set_stream": self.select,
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self.default,
            "synchronize": self.synchronize,
        }


class Stream:
    """A queue of launches, as ``torch.cuda.Stream``."""

    streams: Streams

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = next(self.streams.numbers)

    def wait_stream(self, stream: Stream) -> None:
        """Wait for all that the other stream was given so far."""
        if stream is not self:
            self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        """Wait for what an event recorded."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """An event at what this stream was given so far."""
        event = event or self.streams.event_class()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for all that this stream was given so far."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Whether all is done; a program that asks is told so."""
        return True

    def __enter__(self) -> Stream:
        self._outer = self.streams.current
        self.streams.select(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.streams.select(self._outer)


class Event:
    """A point of a stream, as ``torch.cuda.Event``; its times are zero."""

    streams: Streams

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.point: int | None = None
        self.stream = 0

    def record(self, stream: Stream | None = None) -> None:
        """Take the point that a stream has reached, by default the current one."""
        at = stream or self.streams.current
        self.stream, self.point = at.number, self.streams.log.record(at.number)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream, by default the current one, wait for the point; none was taken: go on."""
        at = stream or self.streams.current
        if self.point is not None and at.number != self.stream:
            self.streams.log.wait(at.number, self.point)

    def synchronize(self) -> None:
        """Let the host wait for the point."""
        if self.point is not None:
            self.streams.log.host_wait(self.point)

    def query(self) -> bool:
        """Whether the point was reached; a program that asks is told so."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events: nothing runs, so none."""
        return 0.0


@contextmanager
def recorded_streams(log: ProgramLog) -> Iterator[Streams]:
    """Put recording streams into ``torch.cuda`` and ``torch.cpu`` inside the context."""
    streams = Streams(log)
    with (
        patch.multiple(torch.cpu, create=True, **streams.namespace()),
        patch.multiple(torch.cuda, create=True, **streams.namespace()),
    ):
        yield streams
