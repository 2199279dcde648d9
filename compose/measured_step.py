"""What a user measured of a step, beside its capture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import Forecast
from itercast.compose.target import Target, forecast_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(ABC):
    """A measured step: its name, its time, and where it ran.

    ``exposed_us``: the part of the step in which compute waited for messages, ``peak_bytes``: of
    tensors, as torch's allocator counts them; both None where they were not measured.
    """

    name: str
    time_us: float
    target: Target
    exposed_us: float | None = None
    peak_bytes: float | None = None

    @property
    def label(self) -> str:
        """The names of the model and its plan."""
        return f"{self.name} {self.plan}".strip()

    @property
    @abstractmethod
    def plan(self) -> str:
        """The plan's text, empty for one process without any."""

    @property
    @abstractmethod
    def engine(self) -> str:
        """How its calls are launched."""

    @property
    @abstractmethod
    def run(self) -> str:
        """A name of its run: equal for runs of one model in the same way, on whichever nodes."""

    @abstractmethod
    def forecast(self, target: Target) -> Forecast:
        """The forecast of the step on a target like its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep(Measured):
    """A measured step of a model under a plan, the target's.

    ``phases_us``: the host's time of forward, loss and backward, None where it was not measured.
    """

    step: StepCapture
    phases_us: float | None = None

    @property
    def plan(self) -> str:
        """The plan's text, empty for one process without any."""
        return str(self.target.plan) if self.target.plan != ParallelPlan() else ""

    @property
    def engine(self) -> str:
        """How the step's calls are launched."""
        return self.step.engine

    @property
    def run(self) -> str:
        """A name of the run: model, plan without its node, sizes, dtypes."""
        target = self.target
        dtypes = sorted({t.dtype for call in self.step.calls for t in call.outputs})
        size = (self.step.samples, self.step.tokens)
        how = (self.step.engine, self.step.optimizer, *dtypes)
        return " ".join(map(str, (target.model, replace(target.plan, node=""), *size, *how)))

    def forecast(self, target: Target) -> Forecast:
        """The forecast of the step on a target, under its plan."""
        return forecast_step(self.step, target)
