"""How one step is split over ranks, from a short string."""

from __future__ import annotations

from dataclasses import dataclass

SUPPORTED = ("dp",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """Degrees of parallelism; so far one process only is executed."""

    dp: int = 1

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise ValueError(f"plan dp={self.dp}: a degree is a positive integer")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp

    @classmethod
    def parse(cls, text: str) -> ParallelPlan:
        """``dp=1`` as a plan; ValueError names the part that is wrong and what is allowed."""
        values: dict[str, int] = {}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            if key not in SUPPORTED:
                raise ValueError(f"plan {text!r}: unknown key {key!r}; known: {list(SUPPORTED)}")
            if not value.isdigit() or int(value) < 1:
                raise ValueError(f"plan {text!r}: {key} is a positive integer, got {value!r}")
            values[key] = int(value)
        plan = cls(**values)
        if plan.world_size > 1:
            raise ValueError(f"plan {text!r}: only dp=1 is supported so far")
        return plan
