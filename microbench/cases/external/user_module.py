"""A module of the user's own as something to capture: a copy without data, inputs, a loss."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from microbench.capture.facts import worth_following
from microbench.capture.fake import fake, made_to_be_read, without_data
from microbench.capture.log import capture_step
from microbench.cases.external.hf_inputs import make_inputs
from microbench.opcall import StepCapture
from microbench.step import StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """A module, its inputs (a tensor, positional arguments, or a dict by name) and its loss.

    ``loss(output)`` gives a scalar; None takes the output's ``loss`` attribute or the output itself
    where it is a scalar. ``inputs`` None: those of a transformers model, or none at all.
    """

    module: Any
    inputs: Any = None
    loss: Callable[[Any], Any] | None = None


def load_function(name: str) -> Callable[..., Any]:
    """The function behind ``module:function``, looked for in the working directory too."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"model {name!r}: expected module:function")
    here = str(Path.cwd())
    sys.path[:0] = [] if here in sys.path else [here]
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as exc:
        raise ValueError(f"model {name!r}: {exc}") from exc
    if not callable(found):
        raise ValueError(f"model {name!r}: {function} is not a function")
    return found  # type: ignore[no-any-return]


def call_function(function: Callable[..., Any], batch: int | None, seq: int | None) -> OwnModel:
    """What the function returns: a module, (module, inputs) or (module, inputs, loss).

    It is given ``batch`` and ``seq`` where it has parameters of those names and they are known.
    """
    known = {"batch": batch, "seq": seq}
    accepted = inspect.signature(function).parameters
    found = function(**{k: v for k, v in known.items() if k in accepted and v is not None})
    parts = found if isinstance(found, tuple) else (found,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], torch.nn.Module):
        kinds = ", ".join(type(p).__name__ for p in parts)
        raise ValueError(f"expected a module, (module, inputs) or (module, inputs, loss): {kinds}")
    return OwnModel(**dict(zip(("module", "inputs", "loss"), parts, strict=False)))


def capture_own(
    make: Callable[[], OwnModel],
    settings: StepSettings,
    *,
    batch: int | None = None,
    seq: int | None = None,
    keep_dtype: bool = False,
) -> StepCapture:
    """One step of the model that ``make`` returns; where it holds data, none of it is copied.

    Samples: ``batch``, else the first axis of the first input. Tokens: samples times ``seq``, else
    the elements of a first input of integers. Floating-point tensors take the settings' dtype
    unless ``keep_dtype``.
    """
    made: dict[str, Any] = {}

    def build() -> Any:
        dtype = None if keep_dtype else torch.get_default_dtype()
        made["own"] = _faked(made_to_be_read(make), dtype)
        return made["own"].module

    def inputs() -> dict[str, Any]:
        made["inputs"] = _named_inputs(made["own"], settings, batch, seq)
        return dict(made["inputs"])

    def loss(output: Any, given: dict[str, Any]) -> Any:
        return _loss(output, made["own"].loss)

    try:
        step = capture_step(build, inputs, loss, settings)
    except Exception as exc:  # the module is the user's: anything may happen in it
        if said_here(exc):
            raise
        raise ValueError(f"the model fails without data: {in_short(exc)}") from exc
    first = next((t for t in tree_leaves(made["inputs"]) if isinstance(t, torch.Tensor)), None)
    shape = first.shape if first is not None else ()
    samples = batch or (shape[0] if shape else 1)
    length = seq or 0
    if first is not None and len(shape) > 1 and not first.is_floating_point():
        length = seq or first.numel() // max(1, shape[0])
    return replace(step, samples=samples, tokens=samples * length)


def said_here(exc: Exception) -> bool:
    """Whether this is a line of ours about what the user gave, and not an error of a model's."""
    last = traceback.extract_tb(exc.__traceback__)[-1]
    return isinstance(exc, ValueError) and last.filename.startswith(str(Path(__file__).parent))


def in_short(exc: Exception) -> str:
    """The error in one line, and where in the user's code it came from."""
    frames = traceback.extract_tb(exc.__traceback__)
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    theirs = [f for f in frames if not f.filename.startswith(ours)]
    where = f" ({Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else ""
    first = next(iter(str(exc).strip().splitlines()), "")
    return f"{type(exc).__name__}: {first}{where}"


def _faked(own: OwnModel, dtype: torch.dtype | None) -> OwnModel:
    """The same model and inputs without data, but for what is small and may steer the model."""

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        if not worth_following(value):
            return fake(value, dtype)
        with _disable_current_modes():
            return value.cpu().clone()

    inputs = tree_map(given, own.inputs)
    written = getattr(own.module, "_orig_mod", own.module)  # inside what torch.compile returns
    return replace(own, module=without_data(written, dtype), inputs=inputs)


def _named_inputs(
    own: OwnModel, settings: StepSettings, batch: int | None, seq: int | None
) -> dict[str, Any]:
    """The inputs by the names of the module's forward, or by number where it has none."""
    signature = inspect.signature(own.module.forward)
    if isinstance(own.inputs, Mapping):
        return dict(own.inputs)
    if own.inputs is None:
        config = getattr(own.module, "config", None)
        if config is not None and hasattr(own.module, "main_input_name"):
            if batch is None or seq is None:
                raise ValueError("a transformers model without inputs needs batch and seq")
            labels = settings.mode == "train" and settings.loss == "default" and own.loss is None
            return make_inputs(own.module, config, batch, seq, labels)
    values = own.inputs if isinstance(own.inputs, list | tuple) else (own.inputs,)
    try:
        bound = signature.bind(*(() if own.inputs is None else values))
    except TypeError as exc:
        raise ValueError(f"inputs of {type(own.module).__name__}: {exc}") from exc
    kinds = {signature.parameters[name].kind for name in bound.arguments}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        forward = own.module.forward
        own.module.forward = lambda **named: forward(*named.values())
        return {f"input{i}": value for i, value in enumerate(values)}
    return dict(bound.arguments)


def _loss(output: Any, loss: Callable[[Any], Any] | None) -> Any:
    """A scalar: the user's loss, the output's own, or the output itself."""
    found = loss(output) if loss is not None else getattr(output, "loss", None)
    found = output if found is None else found
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise ValueError("no scalar loss: give loss(output), or loss 'none' to start at the output")
    return found
