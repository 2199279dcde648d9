"""A captured program: what the ranks that do different work launch in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from itercast.microbench.opcall import StepCapture

COLLECTIVE = "itercast.collective"
HOST = "itercast.host"
RECORD, WAIT, HOST_WAIT = "itercast.record", "itercast.wait", "itercast.host_wait"
MARKS = (RECORD, WAIT, HOST_WAIT)
FIRST_GROUP_STREAM = 1000  # the streams of groups are numbered from here


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCapture:
    """One step of a program over ``world_size`` ranks: the launches of some, by their number.

    Beside op calls the launches are Python of parallel wrappers, ``itercast.host`` with the name of
    an event and its number of tensors, and marks of three kinds, which take no time. A *point* is a
    number:

        itercast.record      (point,)  all that its stream was given so far is done at this point
        itercast.wait        (point,)  what its stream is given from now on waits for the point
        itercast.host_wait   (point,)  the host waits for the point

    A collective is one call, ``itercast.collective``. If the program goes on beside it, it is on a
    stream of its group's own, between the marks that make it wait for its input and others for it;
    messages to and from a rank have a stream each, since NCCL runs them side by side.

    ``peak_bytes``: the most memory that a rank's tensors take during the step. ``samples`` and
    ``tokens`` of a rank's step, 0 where they are not known. ``notes``: what was assumed of it, in
    sentences.
    """

    world_size: int
    ranks: Mapping[int, StepCapture]
    peak_bytes: Mapping[int, int]
    samples: int = 0
    tokens: int = 0
    notes: tuple[str, ...] = ()
