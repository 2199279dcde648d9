"""Parallel plans: how one training step is split over ranks, and the text that names one."""

from __future__ import annotations

from dataclasses import dataclass, fields

DEFAULT_BUCKET_BYTES = 25 * 2**20
NOT_YET = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "microbatches": 1, "zero": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """How one training step is split over ``world_size`` ranks; ``zero`` is the ZeRO stage."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    microbatches: int = 1  # per step and data-parallel replica
    zero: int = 0
    bucket_bytes: int = DEFAULT_BUCKET_BYTES  # gradient bucket; DDP's default is 25 MiB

    def __post_init__(self) -> None:
        degrees = (self.dp, self.tp, self.pp, self.cp, self.ep, self.microbatches)
        if min(*degrees, self.bucket_bytes) < 1:
            raise ValueError(f"degrees are positive integers, got {self!r}")
        if self.zero not in range(4):
            raise ValueError(f"zero is a stage from 0 to 3, got {self.zero}")
        if self.dp % self.ep:
            raise ValueError(f"ep divides dp, got ep={self.ep} with dp={self.dp}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    def __str__(self) -> str:
        """The text that ``parse`` reads: dp and every value that is not its default."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        keep = {f.name for f in fields(self) if values[f.name] != f.default} | {"dp"}
        return ",".join(f"{name}={value}" for name, value in values.items() if name in keep)

    def check_supported(self, text: str = "") -> None:
        """Raise ValueError naming the first strategy that cannot be forecast yet."""
        for name, off in NOT_YET.items():
            if getattr(self, name) != off:
                raise ValueError(
                    f"plan {text or str(self)!r}: {name}={getattr(self, name)} "
                    "not supported yet; supported: dp=N"
                )

    @classmethod
    def parse(cls, text: str) -> ParallelPlan:
        """The plan that text like ``dp=8,zero=3`` names; empty text is one rank."""
        known = [f.name for f in fields(cls)]
        values: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, _, number = (s.strip() for s in part.partition("="))
            if key not in known:
                raise ValueError(f"plan {text!r}: unknown key {key!r}; known: {known}")
            if key in values:
                raise ValueError(f"plan {text!r}: key {key!r} is given twice; allowed: once")
            low = 0 if key == "zero" else 1
            if not (number.isascii() and number.isdecimal() and int(number) >= low):
                raise ValueError(
                    f"plan {text!r}: {key}={number!r} is no integer; allowed: integers >= {low}"
                )
            values[key] = int(number)
        try:
            plan = cls(**values)
        except ValueError as exc:
            raise ValueError(f"plan {text!r}: {exc}") from exc
        plan.check_supported(text)
        return plan
