"""Adds up ops that run one after the other, so that a layer is summed once and then repeated.

The host launches ops one after the other; a kernel starts when it is launched and the compute lane
is free. The times at which host and lane are free after a group of ops are a max-plus linear
function of those before it. Such functions compose, so that four numbers describe any group of ops
exactly. On a CPU there is no host lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Work:
    """Times of a group of ops that run one after the other.

    ``host_us``: launching all of them; ``lane_us``: all kernels one after the other; ``path_us``:
    from the first launch to the end of the last kernel where nothing else delays them; ``comm_us``:
    the part of ``lane_us`` in which compute waits for collectives. ``steps``: the ops, where a
    timeline is to show each of them.
    """

    host_us: float = 0.0
    lane_us: float = 0.0
    path_us: float = 0.0
    comm_us: float = 0.0
    steps: tuple[Step, ...] = ()

    def then(self, other: Work) -> Work:
        """These ops followed by others."""
        return Work(
            self.host_us + other.host_us,
            self.lane_us + other.lane_us,
            max(self.path_us + other.lane_us, self.host_us + other.path_us),
            self.comm_us + other.comm_us,
            self.steps + other.steps,
        )

    def times(self, n: int) -> Work:
        """These ops n times in a row, without showing each of them."""
        if n == 0:
            return Work()
        more = n - 1
        path_us = self.path_us + more * max(self.lane_us, self.host_us)
        return Work(n * self.host_us, n * self.lane_us, path_us, n * self.comm_us)

    def over(self, n: float) -> Work:
        """Their mean over n steps, of which one has them."""
        if n == 1:
            return self
        shown = (replace(s, us=s.us / n, launch_us=s.launch_us / n) for s in self.steps)
        lane_us, path_us, comm_us = self.lane_us / n, self.path_us / n, self.comm_us / n
        return Work(self.host_us / n, lane_us, path_us, comm_us, tuple(shown))

    @property
    def alone_us(self) -> float:
        """Time from the first launch to the end of the last kernel, with nothing before."""
        return max(self.lane_us, self.path_us)


def side_by_side_us(a_us: float, b_us: float, contention: float) -> float:
    """Time of two tasks that start together and slow each other by ``contention`` meanwhile.

    max(a, b) + (contention - 1) * min(a, b)
    """
    return max(a_us, b_us) + (contention - 1) * min(a_us, b_us)


@dataclass(frozen=True, slots=True)
class Step:
    """One op: its time on the compute lane, and the time that the host takes to launch it.

    ``comm``: it is a collective that compute waits for. ``kernels``: it is launched in so many
    equal parts, each of which starts as soon as it is launched.
    """

    us: float
    launch_us: float = 0.0
    comm: bool = False
    kernels: int = 1
    name: str = ""


def fold(steps: Sequence[Step], on_cpu: bool, *, shown: bool = False) -> Work:
    """Sum ops, in launch order, into one piece of work; on a CPU host time adds to each op's.

    ``shown``: a timeline is to show each op.
    """
    each = tuple(steps) if shown else ()
    if on_cpu:
        total = sum(s.us + s.launch_us for s in steps)
        return Work(0.0, total, total, sum(s.us for s in steps if s.comm), each)
    host = lane = path = comm = 0.0
    for s in steps:
        first = host + s.launch_us / s.kernels
        host += s.launch_us
        lane += s.us
        path = max(max(path, first) + s.us, host + s.us / s.kernels)
        comm += s.us if s.comm else 0.0
    return Work(host, lane, path, comm, each)
