"""Time that rests on assumed numbers, added up by the name of the assumption.

Names are ``module.entry`` of an ``assumptions.yaml``, with a key behind it where the entry is a
table (``host.event_us.launch``), or ``fallbacks.<family>`` where other ops are priced instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

AssumedShares = tuple[tuple[str, float], ...]  # name of an assumption, share of a time


@dataclass
class AssumedTime:
    """Times added up: all of them, and by assumption the part that rests on it."""

    total_us: float = 0.0
    by_name_us: dict[str, float] = field(default_factory=dict)

    def add(self, time_us: float, shares: AssumedShares = ()) -> None:
        """Add a time, of which each assumption has its share."""
        self.total_us += time_us
        for name, share in shares:
            self.by_name_us[name] = self.by_name_us.get(name, 0.0) + share * time_us

    def add_all(self, other: AssumedTime, times: float = 1.0) -> None:
        """Add all of another sum, ``times`` times."""
        self.total_us += times * other.total_us
        for name, us in other.by_name_us.items():
            self.by_name_us[name] = self.by_name_us.get(name, 0.0) + times * us

    @property
    def shares(self) -> AssumedShares:
        """Each assumption's share of the whole sum."""
        if not self.total_us:
            return ()
        return tuple((name, us / self.total_us) for name, us in self.by_name_us.items())
