"""What a user measured of a step of their own script, beside its capture."""

from __future__ import annotations

from dataclasses import dataclass

from itercast.capture.base.durations import counted
from itercast.capture.programs.program import ProgramCapture
from itercast.compose.forecast import Forecast
from itercast.compose.measured_step import Measured
from itercast.compose.programs.forecast import forecast_program
from itercast.compose.programs.scripts import ScriptOrder
from itercast.compose.target import Target

ITS_OWN = "as it is"  # plan of a script, which says itself what its ranks do


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredScript(Measured):
    """A measured step of a script, whose target names at most its node."""

    program: ProgramCapture

    @property
    def plan(self) -> str:
        """``ITS_OWN``."""
        return ITS_OWN

    @property
    def engine(self) -> str:
        """The script, which launches its calls itself."""
        return "script"

    @property
    def run(self) -> str:
        """A name of the run: script, numbers of ranks, samples, bytes and launches."""
        program = self.program
        size = [program.world_size, program.samples, program.rows_given]
        size += [*program.peak_bytes.values(), *(len(r.calls) for r in program.ranks.values())]
        return " ".join(map(str, (self.target.model, *size)))

    def forecast(self, target: Target) -> Forecast:
        """The forecast of the script's step on a target."""
        return forecast_program(self.program, target)


def untimed(order: ScriptOrder, program: ProgramCapture) -> MeasuredScript:
    """The step that an order's script made, with a time still to be stated."""
    name = f"{order.path.name} on {counted(order.world_size, 'GPU')}"
    return MeasuredScript(name=name, time_us=1.0, program=program, target=order.target)
