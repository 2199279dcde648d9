"""``predict``: forecasts one iteration of any model on a GPU under a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from itercast.capture.base.extensions import function_of
from itercast.capture.input.lane import InputLane
from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture_micro_batch, model_name
from itercast.compose.forecast import Forecast
from itercast.compose.graph.launch_modes import engine_on, with_engine
from itercast.compose.machines.file import KnownMachine
from itercast.compose.parallel.mixed_precision import HALF
from itercast.compose.target import Target, find_target, forecast_step


def predict(model: Any, *inputs_and_loss: Any, **options: Any) -> Forecast:
    """Forecast one iteration; arguments are those of ``prepare``."""
    return forecast_step(*prepare(model, *inputs_and_loss, **options))


def prepare(
    model: Any,
    inputs: Any = None,
    loss: Callable[[Any], Any] | str = "default",
    *,
    gpu: str = "cpu",
    plan: str = "",
    bundle: Path | None = None,
    engine: str = "eager",
    host: str = "",
    stack: str = "",
    indices: str = "",
    lengths: str = "",
    packed: bool = False,
    machine: KnownMachine | None = None,
    lane: InputLane | None = None,
    **options: Any,
) -> tuple[StepCapture, Target]:
    """The captured micro-batch of a step on ``gpu`` under ``plan``, and the target of its forecast.

    ``engine`` runs the step: graph, compile, or eager, which leaves a model that is under
    torch.compile so. ``host`` names the machine the GPU sits in, ``stack`` the software with its
    release; the usual ones where they are empty. ``indices`` says how embedding bags look rows up:
    uniform, zipf:EXPONENT, or a file of real lookups
    (``itercast.extras.recommenders.tables.index_streams``). ``lengths`` says how long sequences
    are, up to ``seq``: a file or a distribution (``itercast.extras.lengths.sequences``); they
    are padded to the longest of a micro-batch, or ``packed`` into rows of ``seq`` tokens.
    ``machine``: what measured steps told of the machine; a typical one where it is None. ``lane``:
    the DataLoader that feeds each rank; batches are always there where it is None.

    ``model`` is anything ``capture`` takes, with its ``options``, or a captured step. ``batch`` and
    ``seq`` are a replica's; a captured step and a module's inputs are one micro-batch of it. Under
    a plan with amp ``dtype`` is bf16 unless stated, fp16 on a GPU without bf16. A captured step has
    its precision already: FSDP's (amp and zero) is that of a step captured in bf16, without amp.
    """
    parsed = ParallelPlan.parse(plan)
    target = find_target(gpu, parsed, bundle, host, stack, machine, model_name(model))
    target = replace(target, lane=lane)
    if isinstance(model, StepCapture):
        stated = inputs is not None or loss != "default" or options or lengths or packed
        _check_captured(model, parsed, stated)
        step = model
    else:
        options |= {"inputs": inputs, "loss": loss}
        step = capture_micro_batch(model, target, lengths, packed, options)
    launched = step.engine if engine == "eager" else engine
    return with_engine(looking_up(step, indices), engine_on(target.stack, launched)), target


def looking_up(step: StepCapture, indices: str) -> StepCapture:
    """The step whose embedding bags look rows up as ``indices`` of ``prepare`` says, if it does."""
    return function_of("index_streams", "stated")(step, indices) if indices else step


def _check_captured(step: StepCapture, plan: ParallelPlan, stated: object) -> None:
    """ValueError where a captured step cannot be forecast under the plan.

    ``stated``: whether inputs, loss or options were given, which a captured step has already.
    """
    if stated:
        raise ValueError(
            "a captured step has its inputs, loss and options already: "
            "allowed are gpu, plan, bundle, engine, host, stack and indices"
        )
    if plan.autocast:
        raise ValueError(
            f"plan {str(plan)!r}: amp is not allowed for a captured step, which is captured with "
            "amp=True or without"
        )
    if plan.amp and not any(p.dtype in HALF for p in step.parameters):
        raise ValueError(
            f"plan {str(plan)!r}: FSDP casts weights to half precision; allowed is a step that "
            'is captured with dtype="bf16" or "fp16", without amp'
        )
