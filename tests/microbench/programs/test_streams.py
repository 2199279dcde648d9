"""Streams of a captured program tell the log what waits for what."""

from __future__ import annotations

import torch

from itercast.microbench.programs.log import ProgramLog
from itercast.microbench.programs.program import HOST_WAIT, RECORD, WAIT
from itercast.microbench.programs.streams import recorded_streams


def marks(log: ProgramLog) -> list[tuple[str, int, int]]:
    """Kind, stream and point of each mark."""
    return [(call.op, call.stream, call.args[0]) for call in log.calls]


def test_a_stream_that_waits_for_another_waits_for_the_point_it_has_reached() -> None:
    log = ProgramLog()
    with recorded_streams(log):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert log.stream == side.number == 1
        assert log.stream == 0
    assert marks(log) == [(RECORD, 0, 0), (WAIT, 1, 0)]


def test_an_event_is_a_point_of_the_stream_that_recorded_it() -> None:
    log = ProgramLog()
    with recorded_streams(log):
        event, side = torch.cuda.Event(), torch.cuda.Stream()
        event.wait(side)  # not recorded yet: nothing to wait for
        event.record()
        event.wait(side)
        event.wait()  # its own stream: launches are in order anyway
        event.synchronize()
    assert marks(log) == [(RECORD, 0, 0), (WAIT, 1, 0), (HOST_WAIT, 0, 0)]


def test_cpu_code_gets_the_same_streams() -> None:
    """Code for any device asks torch.cpu, which has streams that do nothing otherwise."""
    log = ProgramLog()
    with recorded_streams(log):
        assert torch.cpu.current_stream() is torch.cuda.current_stream()
        torch.cpu.synchronize()
    assert marks(log) == [(RECORD, 0, 0), (HOST_WAIT, 0, 0)]
