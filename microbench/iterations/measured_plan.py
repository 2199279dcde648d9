"""Plans that can be measured, not only forecast, and a step under such a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from itercast.capture.plan import ParallelPlan

OnPhase = Callable[[str], None]
KEYS = (
    *("dp", "tp", "sp", "pp", "zero", "hsdp", "micro", "accumulate"),
    *("cdp", "local", "outer", "schedule", "virtual", "recompute", "compress"),
)


def measurable_plan(text: str) -> ParallelPlan:
    """Reads a plan such as ``dp=2,zero=1``; ValueError where it cannot be measured."""
    plan = ParallelPlan.parse(text)
    unknown = [name for name in plan.stated if name not in KEYS]
    for broken, rule in (
        (unknown != [], f"known keys {', '.join(KEYS)}"),
        (plan.pp > 1 and plan.zero > 0, "pp without zero"),
        (plan.dp > 1 and plan.tp > 1 and not plan.zero, "dp beside tp with zero"),
        (plan.cdp > 0 and plan.zero + plan.pp > 1, "cdp without zero and pp"),
        (plan.recompute not in ("", "full"), "recompute=full"),
        (plan.compress not in ("", "0.5"), "compress=0.5"),
        (plan.compress != "" and plan.cdp + plan.local > 0, "compress with DDP only"),
        (plan.local > 0 and plan.zero + plan.tp * plan.pp > 1, "local with dp alone"),
    ):
        if broken:
            raise ValueError(f"plan {text!r} cannot be measured; allowed: {rule}")
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """A step to repeat.

    ``steps``: how many steps in a row are timed together, if only their mean is of use.
    ``barrier``: ranks wait for each other before each such series; ``finish``: called after the
    last one.
    """

    run: Callable[[], None]
    steps: int = 1
    barrier: bool = True
    finish: Callable[[], None] = lambda: None
