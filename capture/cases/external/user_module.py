"""Captures a user's own module: a fake copy of it, its inputs, its loss, and its errors."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from itercast.capture.base.user_errors import is_own_error, one_line_error
from itercast.capture.cases.external.hf_inputs import make_inputs
from itercast.capture.opcall import StepCapture
from itercast.capture.recorder.facts import is_small_integer
from itercast.capture.recorder.fake import build_fake_else_real, fake_module, fake_tensor
from itercast.capture.recorder.log import capture_step
from itercast.capture.recorder.sparse import check_layouts
from itercast.capture.step import StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModel:
    """A user's module with its inputs and its loss.

    ``inputs`` is a tensor, a tuple of positional arguments or a dict by name; None: those of a
    transformers model, or no inputs at all. ``loss(output)`` returns a scalar; None takes the
    ``loss`` attribute of the output, or the output itself if it is a scalar. ``sizes``: those of
    "batch" and "seq" that the user's function takes, so that the inputs follow them.
    """

    module: Any
    inputs: Any = None
    loss: Callable[[Any], Any] | None = None
    sizes: tuple[str, ...] = ()


def load_function(name: str) -> Callable[..., Any]:
    """Import ``module:function``; modules in the working directory are found too."""
    module, colon, function = name.partition(":")
    if not (module and colon and function) or "/" in module or module.endswith(".py"):
        form = "MODULE:FUNCTION, such as train:model for train.py"
        raise ValueError(f"model {name!r}: expected {form}")
    here = str(Path.cwd())
    sys.path[:0] = [] if here in sys.path else [here]
    try:
        loaded = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as exc:  # whatever the user's code raises
        raise ValueError(f"model {name!r}: {one_line_error(exc)}") from exc
    if not callable(loaded):
        raise ValueError(f"model {name!r}: {function} is not a function")
    return loaded  # type: ignore[no-any-return]


def call_function(function: Callable[..., Any], batch: int | None, seq: int | None) -> UserModel:
    """Call a user's function that returns a module, (module, inputs) or (module, inputs, loss).

    It gets ``batch`` and ``seq`` if it has parameters of these names and they are not None.
    """
    sizes = {"batch": batch, "seq": seq}
    signature = inspect.signature(function)
    arguments = {k: v for k, v in sizes.items() if k in signature.parameters and v is not None}
    try:
        signature.bind(**arguments)
    except TypeError as exc:
        raise ValueError(f"the model's function: {exc}; it is given batch and seq only") from exc
    result = function(**arguments)
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], torch.nn.Module):
        name = getattr(function, "__name__", type(function).__name__)
        kinds = ", ".join(type(p).__name__ for p in parts)
        allowed = "a torch module, (module, inputs) or (module, inputs, loss)"
        raise ValueError(f"model: {name} returns {allowed}, got {kinds}")
    named = dict(zip(("module", "inputs", "loss"), parts, strict=False))
    return UserModel(**named, sizes=tuple(arguments))


def capture_user_model(
    make: Callable[[], UserModel],
    settings: StepSettings,
    *,
    batch: int | None = None,
    seq: int | None = None,
    keep_dtype: bool = False,
) -> StepCapture:
    """Capture one step of the model that ``make`` returns, on fake copies of its tensors.

    Samples per step are ``batch``, else the first axis of the first input; tokens are samples times
    ``seq``, else the number of elements of a first input of integers. Floating-point tensors take
    the settings' dtype unless ``keep_dtype``. The engine is that of a model under torch.compile.
    """
    results: dict[str, Any] = {}

    def build() -> Any:
        dtype = None if keep_dtype else torch.get_default_dtype()
        model = build_fake_else_real(make)
        results["compiled"] = _compiled(model.module)
        results["model"] = _fake_model(model, dtype)
        return results["model"].module

    def inputs() -> dict[str, Any]:
        results["inputs"] = _named_inputs(results["model"], settings, batch, seq)
        return dict(results["inputs"])

    def loss(output: Any, inputs: dict[str, Any]) -> Any:
        return _loss(output, results["model"].loss)

    try:
        step = capture_step(build, inputs, loss, settings)
    except (Exception, SystemExit) as exc:  # whatever the user's code raises
        if is_own_error(exc):
            raise
        raise ValueError(f"the model fails without data: {one_line_error(exc)}") from exc
    rows, length = _sizes(results["inputs"])
    samples, compiled = batch or rows, results["compiled"]
    sizes = {"batch": (batch, rows), "seq": (seq, length)}
    remarks = (*step.remarks, *_remarks(sizes, results["model"].sizes, compiled))
    engine, tokens = compiled.get("", step.engine), samples * (seq or length)
    return replace(step, engine=engine, remarks=remarks, samples=samples, tokens=tokens)


def _remarks(
    sizes: Mapping[str, tuple[int | None, int]],
    followed: Collection[str],
    compiled: Mapping[str, str],
) -> Iterator[str]:
    """Yields remarks on sizes that the inputs do not follow, and on parts that are compiled.

    ``sizes``: by "batch" and "seq" the size asked for and that of the inputs; ``followed``: names
    of those that the inputs follow; ``compiled``: engines of compiled modules by name.
    """
    for name, (asked, own) in sizes.items():
        if asked and own and asked != own and name not in followed:
            stay = f"{name} {asked} only counts: the inputs stay as they are, of {own}"
            yield f"{stay}, as no function of the model has a parameter {name}"
    if compiled and "" not in compiled:
        first, more = next(iter(compiled)), f" and {len(compiled) - 1} more" * (len(compiled) > 1)
        parts = f"{first}{more}: torch.compile of parts of a model is forecast eager"
        yield f"{parts}; --compile (engine='compile') compiles all of it"


def _sizes(inputs: Any) -> tuple[int, int]:
    """Samples, and tokens per sample, of the first input tensor; 0 tokens unless it is integer."""
    first = next((t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)), None)
    if first is None or not first.shape:
        return 1, 0
    tokens = len(first.shape) > 1 and not first.is_floating_point()
    return first.shape[0], first.numel() // max(1, first.shape[0]) if tokens else 0


def _compiled(module: torch.nn.Module) -> dict[str, str]:
    """Engines ("compile" or "compile+graph") of modules under torch.compile; "" names the whole."""
    engines = {}
    for name, part in module.named_modules():
        call: Any = part if hasattr(part, "_orig_mod") else part._compiled_call_impl
        if call is not None:
            config = call.get_compiler_config() or {}  # None of a backend without one
            engines[name] = "compile+graph" if config.get("triton.cudagraphs") else "compile"
    return engines


def _fake_model(model: UserModel, dtype: torch.dtype | None) -> UserModel:
    """The model with tensors without data; small integer inputs are real, as models read them."""

    def fake_input(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        if not is_small_integer(value):
            return fake_tensor(value, dtype)
        with _disable_current_modes():
            return value.cpu().clone()

    named = model.inputs if isinstance(model.inputs, Mapping) else {"": model.inputs}
    check_layouts((f"input {name}".strip(), t) for name, x in named.items() for t in tree_leaves(x))
    inputs = tree_map(fake_input, model.inputs)
    module = getattr(model.module, "_orig_mod", model.module)  # inside what torch.compile returns
    return replace(model, module=fake_module(module, dtype), inputs=inputs)


def _named_inputs(
    model: UserModel, settings: StepSettings, batch: int | None, seq: int | None
) -> dict[str, Any]:
    """The inputs by the argument names of the module's forward, or numbered if it has none."""
    signature = inspect.signature(model.module.forward)
    if isinstance(model.inputs, Mapping):
        return dict(model.inputs)
    if model.inputs is None:
        config = getattr(model.module, "config", None)
        if config is not None and hasattr(model.module, "main_input_name"):
            if batch is None or seq is None:
                raise ValueError("a transformers model without inputs needs batch and seq")
            labels = settings.mode == "train" and settings.loss == "default" and model.loss is None
            return make_inputs(model.module, config, batch, seq, labels)
    values = model.inputs if isinstance(model.inputs, list | tuple) else (model.inputs,)
    try:
        bound = signature.bind(*(() if model.inputs is None else values))
    except TypeError as exc:
        raise ValueError(f"inputs of {type(model.module).__name__}: {exc}") from exc
    kinds = {signature.parameters[name].kind for name in bound.arguments}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        forward = model.module.forward
        model.module.forward = lambda **named: forward(*named.values())
        return {f"input{i}": value for i, value in enumerate(values)}
    return dict(bound.arguments)


def _loss(output: Any, loss: Callable[[Any], Any] | None) -> Any:
    """The scalar loss: the user's function of the output, its ``loss``, or the output itself."""
    value = loss(output) if loss is not None else getattr(output, "loss", None)
    value = output if value is None else value
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        kind = str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"no scalar loss, got {kind}: give loss(output), or loss 'none' to start at the output"
        )
    return value
