"""Streams, events and CUDA graphs of a captured program, which record what waits for what.

Code that runs on any device takes its streams from ``torch.cuda`` or ``torch.cpu``. While a program
is captured, both have the classes below: they do nothing but tell the log which stream ops are
launched on, and where one stream waits for another.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from unittest.mock import patch

import torch

from itercast.capture.opcall import OpCall
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.program import HOST


class Streams:
    """Makes the streams of a program, and knows the current one."""

    def __init__(self, log: ProgramLog) -> None:
        self.log = log
        self.numbers, self.pool_numbers = count(), count()
        self.pools = dict[Any, GraphPool]()  # by their handles
        # classes, which programs name in annotations; device and priority change nothing
        self.stream_class = type("Stream", (Stream,), {"streams": self})
        self.event_class = type("Event", (Event,), {"streams": self})
        self.graph_class = type("CUDAGraph", (Graph,), {"streams": self})
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

    def pool_handle(self) -> tuple[int, int]:
        """The handle of a new pool for the memory of CUDA graphs."""
        return 1, next(self.pool_numbers)

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
            "CUDAGraph": self.graph_class,
            "graph": captured_graph,
            "graph_pool_handle": self.pool_handle,
            "is_current_stream_capturing": lambda: self.current.is_capturing(),
        }

    def of_accelerator(self) -> dict[str, Any]:
        """The functions to put into ``torch.accelerator``, by name."""
        names = ("current_stream", "set_stream", "synchronize")
        return {name: self.namespace()[name] for name in names}


class Stream:
    """A queue of launches, as ``torch.cuda.Stream``."""

    streams: Streams

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = next(self.streams.numbers)

    @property
    def cuda_stream(self) -> int:
        """A number in place of CUDA's handle, as libraries of kernels pass it on; default: 0."""
        return self.number

    def wait_stream(self, stream: Stream) -> None:
        """Wait for all that the other stream was given so far."""
        if stream is not self:
            self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        """Wait for what an event recorded."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Record in an event the point that this stream has reached."""
        event = event or self.streams.event_class()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for all that this stream was given so far."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Whether all is done; a program that asks is told so."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph takes what is launched."""
        return self.streams.log.after_graph is not None

    def __enter__(self) -> Stream:
        self._outer = self.streams.current
        self.streams.select(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.streams.select(self._outer)


class Event:
    """A point of a stream, as ``torch.cuda.Event``; its times are those of this process."""

    streams: Streams

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.point: int | None = None
        self.stream = self.recorded_ns = 0

    def record(self, stream: Stream | None = None) -> None:
        """Take the point that a stream has reached, by default the current one."""
        number = (stream or self.streams.current).number
        self.stream, self.point = number, self.streams.log.record(number)
        self.recorded_ns = time.perf_counter_ns()

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream, by default the current one, wait for the point, if one was recorded."""
        number = (stream or self.streams.current).number
        if self.point is not None and number != self.stream:
            self.streams.log.wait(number, self.point)

    def synchronize(self) -> None:
        """Let the host wait for the point."""
        if self.point is not None:
            self.streams.log.host_wait(self.point)

    def query(self) -> bool:
        """Whether the point was reached; a program that asks is told so."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events in this process: more than none, though nothing runs."""
        return (end.recorded_ns - self.recorded_ns) * 1e-6


@dataclass
class GraphPool:
    """Memory that CUDA graphs share: what is free in it is for their captures alone."""

    free_bytes: int = 0
    graphs: int = 0


class Graph:
    """A CUDA graph, as ``torch.cuda.CUDAGraph``: one launch of all that is launched in its capture.

    Its tensors stay in the memory of its pool until it is gone. ``after``: called after each
    launch.
    """

    streams: Streams

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[OpCall] = []
        self.after: list[Callable[[], None]] = []
        self.reset = lambda: None

    def capture_begin(self, pool: Any = None, *args: Any, **kwargs: Any) -> None:
        """Begin a capture: what is launched from now on is the graph's, and does not run."""
        log, self.handle = self.streams.log, pool or self.streams.pool_handle()
        self.memory = self.streams.pools.setdefault(self.handle, GraphPool())
        self.memory.graphs += 1
        self.reset = weakref.finalize(self, _left, self.memory, log)
        log.after_graph, self.start, self.host = self.after, len(log.calls), dict(log.host)
        self.stream, self.live = log.stream, log.live_bytes
        self.peak, log.peak_bytes = log.peak_bytes, log.live_bytes

    def capture_end(self) -> None:
        """End the capture: move what was launched since its begin from the log to the graph.

        Its peak came out of what was free in the pool, and only the rest out of the GPU's memory.
        """
        log, pool = self.streams.log, self.memory
        log.after_graph, log.host = None, self.host
        self.calls = [c for c in log.calls[self.start :] if c.op != HOST]
        del log.calls[self.start :]
        kept_bytes = log.live_bytes - self.live
        grown_bytes = max(0, log.peak_bytes - self.live - pool.free_bytes)
        log.live_bytes = self.live + grown_bytes
        log.graph_bytes += grown_bytes - kept_bytes
        pool.free_bytes += grown_bytes - kept_bytes
        log.peak_bytes = max(self.peak, log.live_bytes)

    def replay(self) -> None:
        """Launch all of it on the current stream."""
        log = self.streams.log
        number = -1 - next(log.points)
        for call in self.calls:
            stream = log.stream if call.stream == self.stream else call.stream
            log.calls.append(replace(call, graphed=number, stream=stream))
        for ended in self.after:
            ended()

    def pool(self) -> tuple[int, int]:
        """The handle of the pool of its memory."""
        handle: tuple[int, int] = self.handle
        return handle


def _left(pool: GraphPool, log: ProgramLog) -> None:
    """Give a pool's memory back after the last of its graphs is gone."""
    pool.graphs -= 1
    if not pool.graphs:
        log.graph_bytes -= pool.free_bytes
        log.take(-pool.free_bytes)
        pool.free_bytes = 0


@contextmanager
def captured_graph(graph: Graph, pool: Any = None, *args: Any, **kwargs: Any) -> Iterator[None]:
    """As ``torch.cuda.graph``."""
    graph.capture_begin(pool)
    yield
    graph.capture_end()


@contextmanager
def recorded_streams(log: ProgramLog) -> Iterator[Streams]:
    """Put recording streams into torch, ``torch.cuda`` and ``torch.cpu`` inside the context."""
    streams = Streams(log)
    with (
        patch.multiple(torch, Stream=streams.stream_class, Event=streams.event_class),
        patch.multiple(torch.cpu, create=True, **streams.namespace()),
        patch.multiple(torch.cuda, create=True, **streams.namespace()),
        patch.multiple(torch.accelerator, create=True, **streams.of_accelerator()),
    ):
        yield streams
