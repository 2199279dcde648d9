"""``capture`` and ``predict`` a model's step under a plan, or a program that runs on many ranks.

``checkpoint`` makes a model recompute what a forecast chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from itercast.capture.base.extensions import function_of
from itercast.capture.programs.program import ProgramCapture
from itercast.compose import capture_model
from itercast.compose import predict as plans
from itercast.compose.forecast import Forecast

if TYPE_CHECKING:
    from itercast.capture.opcall import StepCapture


def capture(
    model: Any, *inputs: Any, world_size: int = 0, ranks: Sequence[int] = (), **options: Any
) -> StepCapture | ProgramCapture:
    """Capture a training step of a model, or of a program over ``world_size`` ranks.

    A model is captured as ``itercast.compose.capture_model.capture`` says. A program is a function
    that builds and parallelises the model as under torchrun, and returns a function that runs one
    training step. One rank of each pipeline stage is captured, or ``ranks``.
    """
    if not world_size:
        return capture_model.capture(model, *inputs, **options)
    if inputs or options or not callable(model):
        raise ValueError("a program is a function without arguments, and has no other options")
    from itercast.capture.programs.capture import capture_program  # needs torch

    return capture_program(model, world_size, ranks)


def predict(
    model: Any,
    *inputs: Any,
    gpu: str = "cpu",
    plan: str = "",
    bundle: Path | None = None,
    host: str = "",
    stack: str = "",
    **options: Any,
) -> Forecast:
    """Forecast one iteration of a model under a plan, or of a captured program.

    A model is forecast as ``itercast.compose.predict.prepare`` says. Of a program the plan names at
    most the node: ``node=dgx-h100``.
    """
    if not isinstance(model, ProgramCapture):
        options |= {"gpu": gpu, "plan": plan, "bundle": bundle, "host": host, "stack": stack}
        return plans.predict(model, *inputs, **options)
    from itercast.compose.programs.forecast import forecast_program
    from itercast.compose.target import find_target

    target = find_target(gpu, plan, bundle, host, stack)
    if inputs or options or target.plan.world_size > 1:
        raise ValueError(f"plan {plan!r}: a program brings its own, only node=NAME is allowed")
    return forecast_program(model, target)


def checkpoint(model: Any, policy: Path) -> None:
    """Make each numbered layer of a torch module save and recompute as a policy file says.

    ``policy`` is a file that ``itercast predict --policy`` wrote for ``recompute=budget:SHARE``.
    """
    function_of("checkpoints", "apply")(model, policy)
