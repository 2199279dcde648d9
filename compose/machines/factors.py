"""Factors of a machine: by how much the parts of a step take longer on it than they are priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from math import exp, log


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Factors of time: above 1 the machine is slower than its parts are priced.

    ``products``: matrix products, convolutions and attention; ``memory``: all other kernels;
    ``links``: messages within a node; ``network``: messages between nodes; ``host``: Python,
    autograd and launches.
    """

    products: float = 1.0
    memory: float = 1.0
    links: float = 1.0
    network: float = 1.0
    host: float = 1.0

    def __post_init__(self) -> None:
        if min(astuple(self)) <= 0:
            raise ValueError(f"factors of a machine are positive, got {self}")

    @classmethod
    def of_logs(cls, logs: Sequence[float]) -> Factors:
        """Factors by their natural logarithms, in the order of ``NAMES``."""
        return cls(**{name: exp(x) for name, x in zip(NAMES, logs, strict=True)})

    @property
    def logs(self) -> tuple[float, ...]:
        """Natural logarithms of the factors, in the order of ``NAMES``."""
        return tuple(map(log, astuple(self)))

    def of_message(self, size: int, per_node: int) -> float:
        """The factor of the time of a message among ``size`` ranks, ``per_node`` on each node."""
        return self.links if size <= per_node else self.network


NAMES = tuple(f.name for f in fields(Factors))
NONE = Factors()
