"""Plans that can be measured, not only forecast, and a step under such a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

OnPhase = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A parallel plan that can be measured; ValueError for other plans."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    micro: int = 0
    accumulate: int = 1
    cdp: int = 0
    schedule: str = "1f1b"
    recompute: str = ""
    compress: float = 1.0

    def __post_init__(self) -> None:
        axes = sum(n > 1 for n in (self.dp, self.tp, self.pp))
        for broken, rule in (
            (axes > 1, "one of dp, tp and pp"),
            (self.recompute not in ("", "full"), "recompute=full"),
            (self.schedule not in ("1f1b", "gpipe"), "schedule 1f1b or gpipe"),
            (self.compress not in (0.5, 1.0), "compress=0.5"),
            (self.compress < 1 and (self.zero > 0 or self.cdp > 0), "compress with DDP only"),
        ):
            if broken:
                raise ValueError(f"plan {self} cannot be measured; allowed: {rule}")

    @classmethod
    def parse(cls, text: str) -> MeasuredPlan:
        """Parse a plan such as ``dp=2,zero=1``; ValueError for unknown keys."""
        kinds: dict[str, Any] = {f.name: type(f.default) for f in fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            if key not in kinds:
                raise ValueError(f"plan {text!r} cannot be measured; known keys: {list(kinds)}")
            values[key] = kinds[key](value)
        return cls(**values)

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.dp * self.tp * self.pp

    @property
    def microbatches(self) -> int:
        """Micro-batches per step and replica."""
        return max(self.micro or self.pp, self.accumulate)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """A step to repeat.

    ``barrier``: ranks wait for each other before every step; ``finish``: called after the last one.
    """

    run: Callable[[], None]
    barrier: bool = True
    finish: Callable[[], None] = lambda: None
