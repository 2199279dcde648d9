"""A step that a user measured, beside its capture."""

from __future__ import annotations

from dataclasses import dataclass

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A measured step: its model's name, its time, its capture, and where it ran.

    ``phases_us``: the host's time of forward, loss and backward, None where it was not measured.
    ``exposed_us``: the part of the step in which compute waited for messages, ``peak_bytes``: of
    tensors, as torch's allocator counts them; both None where they were not measured.
    """

    name: str
    time_us: float
    step: StepCapture
    target: Target
    phases_us: float | None = None
    exposed_us: float | None = None
    peak_bytes: float | None = None

    @property
    def label(self) -> str:
        """The names of the model and its plan."""
        return f"{self.name} {self.plan}".strip()

    @property
    def plan(self) -> str:
        """The plan's text, empty for one process without any."""
        return str(self.target.plan) if self.target.plan != ParallelPlan() else ""
