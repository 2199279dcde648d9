"""The 80 % interval of an iteration, from the intervals of its ops and how their errors correlate.

An error is log(measured / forecast); an op's interval gives the half width h of its error. The log
error of the iteration is the sum of share * error, where share is the op's part of the iteration
time. Calls of the same op with the same forecast time are taken to have the same error, and form a
group. For each family let

    S = sum of share * h,    Q = sum of (share * h)**2    (over its groups)

The half width of the iteration's error that its ops cause is then

    ops**2 = between * (sum of S)**2 + sum of ((within - between) * S**2 + (1 - within) * Q)

with sums over families; ``within`` is the correlation of errors of two groups of a family,
``between`` that of two families. Both are lower for ops inside the envelope of their training rows
("seen") than for others, among them all on GPUs without rows ("unseen"); the two kinds are summed
as independent. Three more independent errors are those of the host, of all that is not an op's
(order of ops, network...), and of assumed numbers:

    h**2 = ops**2 + host**2 + shared**2 + (assumed * assumed_frac)**2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, hypot, log, sqrt

from itercast.compose.pricing.price_book import PricedOp
from itercast.microbench.assumptions import assumed

HalfWidths = tuple[float, float]  # of an 80 % interval below and above a forecast, in log time
WITHIN: Mapping[str, float] = assumed(__file__, "within_family")
BETWEEN: Mapping[str, float] = assumed(__file__, "between_families")
SHARED: Mapping[str, float] = assumed(__file__, "shared_log_interval")
ASSUMED: float = assumed(__file__, "assumed_log_interval")


@dataclass(frozen=True, slots=True)
class SameErrorCalls:
    """Calls that share an error: of the same op, with the same forecast time.

    ``time_us`` is the forecast of one call, ``below`` and ``above`` are half widths of its error in
    log time; ``seen``: inside the envelope of the training rows; ``on_comm``: on a communication
    lane.
    """

    family: str
    op: str
    time_us: float
    below: float
    above: float
    seen: bool
    on_comm: bool


@dataclass
class OpErrors:
    """The ops of an iteration grouped by calls that share an error: total time in us of each."""

    time_us: dict[SameErrorCalls, float] = field(default_factory=dict)

    def add(self, op: PricedOp, times: float, *, on_comm: bool = False) -> None:
        """Add an op that runs ``times`` times; ``on_comm``: on a communication lane."""
        us = op.duration_us
        if us > 0:
            below, above = log(us / min(us, max(op.low_us, 1e-9))), log(max(us, op.high_us) / us)
            alike = SameErrorCalls(op.family, op.op, us, below, above, op.in_envelope, on_comm)
            self.time_us[alike] = self.time_us.get(alike, 0.0) + times * us

    def half_widths(self, per_us: float, comm_per_us: float) -> HalfWidths:
        """Half widths of the iteration's error that its ops cause (``ops`` above).

        Shares are times in us multiplied by ``per_us`` = 1 / iteration for compute, and by
        ``comm_per_us`` for communication, which is less where messages are hidden.
        """
        sums: dict[tuple[str, bool], list[float]] = {}
        for alike, us in self.time_us.items():
            share = us * (comm_per_us if alike.on_comm else per_us)
            below, above = share * alike.below, share * alike.above
            one = sums.setdefault((alike.family, alike.seen), [0.0] * 4)
            for i, value in enumerate((below, above, below**2, above**2)):
                one[i] += value
        return _combined(sums, 0), _combined(sums, 1)


def _combined(sums: Mapping[tuple[str, bool], list[float]], side: int) -> float:
    """The half width that ops cause on one side: 0 below, 1 above.

    ``sums`` by (family, seen): [S below, S above, Q below, Q above].
    """
    variance = 0.0
    for kind, seen in (("seen", True), ("unseen", False)):
        within, between = WITHIN[kind], BETWEEN[kind]
        own = [one for (_, inside), one in sums.items() if inside == seen]
        variance += between * sum(one[side] for one in own) ** 2
        variance += sum((within - between) * one[side] ** 2 for one in own)
        variance += sum((1 - within) * one[2 + side] for one in own)
    return sqrt(max(0.0, variance))


def interval(
    iteration_us: float, ops: HalfWidths, host: HalfWidths, assumed_frac: float, kind: str
) -> tuple[float, float]:
    """The 10 and 90 % quantiles of an iteration's time in us.

    ``ops`` and ``host`` are half widths: those that its ops cause, and those of the host where a
    GPU waits for it. ``kind`` of device is cpu or gpu.
    """
    common = hypot(SHARED[kind], ASSUMED * assumed_frac)
    below, above = (hypot(one, other, common) for one, other in zip(ops, host, strict=True))
    return iteration_us * exp(-below), iteration_us * exp(above)
