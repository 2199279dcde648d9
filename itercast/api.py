"""The public API: ``capture`` a training step of any model, ``predict`` its iteration time.

from itercast.api import capture, predict

predict("gpt2-small", gpu="h100-sxm-80gb").iteration_us
predict(model, inputs, loss, gpu="h100-sxm-80gb", dtype="bf16")

step = capture(model, inputs, loss)  # once
for plan in ("dp=1", "dp=8"):
    print(plan, predict(step, gpu="h100-sxm-80gb", plan=plan).iteration_us)

program = capture(build_and_parallelise, world_size=64)  # as torchrun would run it
predict(program, gpu="h100-sxm-80gb", plan="node=dgx-h100").iteration_us

time_parts(predict("gpt2-small", gpu="h100-sxm-80gb"))  # where the time goes

checkpoint(model, Path("policy.json"))  # as `itercast predict --policy` chose
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported when used: together they take over a second
    from itercast.capture.opcall import StepCapture
    from itercast.compose.forecast import Forecast
    from itercast.compose.time_parts import time_parts
    from itercast.forecasting import capture, checkpoint, predict

MODULES = {
    "Forecast": "compose.forecast",
    "StepCapture": "capture.opcall",
    "capture": "forecasting",
    "checkpoint": "forecasting",
    "predict": "forecasting",
    "time_parts": "compose.time_parts",
}
__all__ = ["Forecast", "StepCapture", "capture", "checkpoint", "predict", "time_parts"]


def __getattr__(name: str) -> Any:
    """Import a name of this module when it is first used."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"itercast.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    """The names of this module."""
    return sorted(__all__)
