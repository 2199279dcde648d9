"""The 80 % interval of an iteration, from those of its ops and how their errors go together.

Errors are logarithms, log(measured / forecast). An op's own interval states the half width h of its
error; ops that take the shares w of an iteration add w * error to the iteration's. Calls of one op
that take equally long have one error. With S = sum of w * h over a family's ops and Q = sum of
(w * h)**2, each over calls that have one error,

    h**2 = between * (sum of S)**2 + sum of ((within - between) * S**2 + (1 - within) * Q)

is that of all ops, where ``within`` is the correlation of errors of two ops of a family and
``between`` that of ops of two families. Ops inside the envelope of their training rows have other
correlations than those outside and those on GPUs that were not measured; errors of the two kinds
are independent. What is not of ops (the order of ops, the host's other work, the network) is wrong
for a whole iteration at once: ``shared``; and more, the more of it rests on assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, hypot, log, sqrt

from compose.pricing.price_book import PricedOp
from microbench.assumptions import assumed

HalfWidths = tuple[float, float]  # of an 80 % interval below and above a forecast, in log time
WITHIN: Mapping[str, float] = assumed(__file__, "within_family")
BETWEEN: Mapping[str, float] = assumed(__file__, "between_families")
SHARED: Mapping[str, float] = assumed(__file__, "shared_log_interval")
ASSUMED: float = assumed(__file__, "assumed_log_interval")


@dataclass(frozen=True, slots=True)
class CallsAlike:
    """Calls that have one error: of one op, equally long, on one lane; half widths of its error."""

    family: str
    op: str
    time_us: float
    below: float
    above: float
    seen: bool
    on_comm: bool


@dataclass
class OpErrors:
    """Time in us of all ops of an iteration, by calls that have one error."""

    time_us: dict[CallsAlike, float] = field(default_factory=dict)

    def add(self, op: PricedOp, times: float, *, on_comm: bool = False) -> None:
        """Add an op that runs ``times`` times."""
        us = op.duration_us
        if us > 0:
            below, above = log(us / min(us, max(op.low_us, 1e-9))), log(max(us, op.high_us) / us)
            alike = CallsAlike(op.family, op.op, us, below, above, op.in_envelope, on_comm)
            self.time_us[alike] = self.time_us.get(alike, 0.0) + times * us

    def half_widths(self, per_us: float, comm_per_us: float) -> HalfWidths:
        """Half widths of the iteration's error by its ops.

        ``per_us``: what a us of compute adds to the log of the iteration; ``comm_per_us`` of a
        message, of which a part is hidden.
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
    """The half width of ``OpErrors`` on one side; ``sums``: S below and above, Q likewise."""
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
    """The 10 and 90 % quantiles of an iteration in us, by half widths of independent errors.

    ``ops`` of its ops, ``host`` of the host that a GPU waits for; ``kind`` of device: cpu or gpu.
    """
    common = hypot(SHARED[kind], ASSUMED * assumed_frac)
    below, above = (hypot(one, other, common) for one, other in zip(ops, host, strict=True))
    return iteration_us * exp(-below), iteration_us * exp(above)
