"""Adds up ops that run one after the other, so that a layer is summed once and then repeated.

The host launches ops one after the other; a kernel starts when it is launched and the compute lane
is free. The host waits for the end of an op if it needs the result, as for a shape that depends on
data. The times at which host and lane become free after a group of ops are max-plus linear
functions (a maximum of sums) of the times before it. Such functions compose, so that a few numbers
describe any group of ops exactly. On a CPU there is no host lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True, slots=True)
class Work:
    """Times of a group of ops that run one after the other.

    ``host_us``: launching all of them. ``lane_us``: all kernels one after the other. ``path_us``:
    from the first launch to the end of the last kernel, if both host and lane are free at the
    start. ``comm_us``: the part of ``lane_us`` in which compute waits for collectives.
    ``product_us``: the part in matrix products, convolutions and attention. ``steps``: the ops, if
    a timeline shows each. If the host waits for an op of the group, and the lane is free later than
    the host: ``wait_us`` is from then until the host has launched all, ``stall_us`` until the last
    kernel ends.
    """

    host_us: float = 0.0
    lane_us: float = 0.0
    path_us: float = 0.0
    comm_us: float = 0.0
    steps: tuple[Step, ...] = ()
    wait_us: float = -inf
    stall_us: float = -inf
    product_us: float = 0.0

    def then(self, other: Work) -> Work:
        """These ops followed by others: each maximum is over the paths through host and lane."""
        end_us, more_us = (max(w.lane_us, w.stall_us) for w in (self, other))
        return Work(
            max(self.host_us + other.host_us, self.path_us + other.wait_us),
            self.lane_us + other.lane_us,
            max(self.path_us + more_us, self.host_us + other.path_us),
            self.comm_us + other.comm_us,
            self.steps + other.steps,
            max(self.wait_us + other.host_us, end_us + other.wait_us),
            max(self.stall_us + more_us, end_us + other.stall_us, self.wait_us + other.path_us),
            self.product_us + other.product_us,
        )

    def times(self, n: int) -> Work:
        """These ops n times in a row, without showing each of them."""
        total, each = Work(), replace(self, steps=())
        for binary_digit in f"{n:b}":
            total = total.then(total)
            total = total.then(each) if binary_digit == "1" else total
        return total

    def over(self, n: float) -> Work:
        """The mean over n steps of ops that only every n-th step runs."""
        if n == 1:
            return self
        shown = (replace(s, us=s.us / n, launch_us=s.launch_us / n) for s in self.steps)
        host_us, lane_us, path_us = self.host_us / n, self.lane_us / n, self.path_us / n
        last = (self.wait_us / n, self.stall_us / n, self.product_us / n)
        return Work(host_us, lane_us, path_us, self.comm_us / n, tuple(shown), *last)

    @property
    def products_frac(self) -> float:
        """The share of ``lane_us`` in matrix products, convolutions and attention."""
        return self.product_us / self.lane_us if self.lane_us else 0.0

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

    ``comm``: it is a collective that compute waits for. ``kernels``: it is launched as this many
    equal parts, each of which starts once it is launched. ``waits``: the host waits for its end.
    ``phase``, ``nbytes`` and ``product``: as of ``PricedOp``.
    """

    us: float
    launch_us: float = 0.0
    comm: bool = False
    kernels: int = 1
    name: str = ""
    waits: bool = False
    phase: str = ""
    nbytes: float = 0.0
    product: bool = False


def fold(steps: Sequence[Step], on_cpu: bool, *, shown: bool = False) -> Work:
    """Sum ops, in launch order, into one piece of work; on a CPU host time adds to each op's.

    ``shown``: a timeline is to show each op.
    """
    each = tuple(steps) if shown else ()
    if on_cpu:
        total = sum(s.us + s.launch_us for s in steps)
        return Work(0.0, total, total, sum(s.us for s in steps if s.comm), each)
    host = lane = path = comm = stall = 0.0
    wait = -inf  # host and end of the last kernel, where only the lane was busy before
    for s in steps:
        first_us, last_us = s.launch_us / s.kernels, s.us / s.kernels
        path = max(max(path, host + first_us) + s.us, host + s.launch_us + last_us)
        stall = max(max(stall, wait + first_us) + s.us, wait + s.launch_us + last_us)
        host, wait = (path, stall) if s.waits else (host + s.launch_us, wait + s.launch_us)
        lane += s.us
        comm += s.us if s.comm else 0.0
    products = sum(s.us for s in steps if s.product)
    return Work(host, lane, path, comm, each, wait, stall if wait > -inf else -inf, products)
