"""Patches under which models run on fake tensors as on real ones, eagerly and uncompiled."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from traceback import StackSummary
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.base.slow_imports import once_imported
from itercast.capture.opcall import Args, Argument, Kwargs
from itercast.capture.recorder.attention import flex_as_sdpa
from itercast.capture.recorder.fake import as_subclass, fake_tensor, make_subclass
from itercast.capture.recorder.replaced.remembered import FAKE, run_remembered, view_of, views_one
from itercast.capture.recorder.replaced.scripted import scripted_as_python

WARNS = "warn_if_padding_and_no_attention_mask"


APPLY, NEW, COPY = torch.nn.Module._apply, FakeTensor.__new__, Tensor.__deepcopy__
PARAMETER = torch.nn.Parameter.__new__
STORAGE_ADDRESS = torch.UntypedStorage.data_ptr
# GPT-NeoX gives parameters a number of this name, by which torch would no longer find the method
MEGATRON_STRIDE = property(lambda t: partial(Tensor.stride, t), lambda t, number: None)


def _apply(module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Argument:
    """Replace ``Module._apply`` (to, half, ...): convert in place, where torch's fails on fakes.

    Parameters on the meta device are replaced, tied ones by one. Modules with distributed tensors
    are left to torch.
    """
    if any(type(p.data) is not FakeTensor for p in module.parameters()):
        return APPLY(module, fn, recurse)
    new: dict[int, torch.nn.Parameter] = {}
    for owner in module.modules() if recurse else [module]:
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in new:
                owner._parameters[name] = new[id(parameter)]
                continue
            with torch.no_grad():
                converted = _on_cpu(fn(parameter))
            if parameter.is_meta:
                new[id(parameter)] = torch.nn.Parameter(converted, parameter.requires_grad)
                owner._parameters[name] = new[id(parameter)]
            elif converted is not parameter:
                parameter.data = converted
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = _on_cpu(fn(buffer))
    return module


def _on_cpu(tensor: Tensor) -> Tensor:
    """The tensor; ValueError if it is neither on the CPU nor on the meta device."""
    if tensor.device.type not in ("cpu", "meta"):
        raise ValueError(f"a capture is made on the CPU: do not move the model to {tensor.device}")
    return tensor


def _format(tensor: Tensor, spec: str) -> str:
    """Format a tensor without axes as its number if that is known, any other as its repr."""
    try:
        return format(tensor.item() if tensor.dim() == 0 else repr(tensor), spec)
    except DataDependentOutputException:
        return format(repr(tensor), spec)


def _deepcopy(tensor: Tensor, memo: dict[int, Tensor]) -> Tensor:
    """A new fake tensor of the same form; torch would copy the missing storage and fail."""
    if id(tensor) not in memo:
        memo[id(tensor)] = fake_tensor(tensor, None)
    return memo[id(tensor)]


def _pickled(tensor: Tensor, protocol: int) -> Any:
    """As ``__reduce_ex__`` of a tensor without data: its shape, strides and dtype are kept."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    form = tuple(tensor.size()), tensor.stride(), tensor.dtype, tensor.requires_grad
    return _unpickled, (is_parameter, *form)


def _unpickled(is_parameter: bool, size: Any, stride: Any, dtype: Any, trains: bool) -> Tensor:
    """The tensor that ``_pickled`` describes."""
    tensor = torch.empty_strided(size, stride, dtype=dtype, requires_grad=trains)
    return torch.nn.Parameter(tensor, trains) if is_parameter else tensor


def _copied(tensor: Tensor, memo: dict[int, Tensor]) -> Any:
    """As ``Tensor.__deepcopy__``; the copy of one with data, such as a mesh's ranks, has them."""
    with _disable_current_modes() if type(tensor) is Tensor else nullcontext():
        return COPY(tensor, memo)


def _new(kind: type[FakeTensor], *args: Any, **kwargs: Any) -> Any:
    """As ``FakeTensor.__new__``, or a parameter where loaders of weights call ``type(p)(data)``."""
    if len(args) == 1 and isinstance(args[0], Tensor) and kwargs.keys() <= {"requires_grad"}:
        return torch.nn.Parameter(args[0], **kwargs)
    return NEW(kind, *args, **kwargs)


def _parameter(kind: Any, data: Any = None, requires_grad: bool = True) -> Any:
    """As ``Parameter.__new__``, which makes no instance of a subclass over a fake tensor."""
    of_torch = kind is torch.nn.Parameter or type(data) is not FakeTensor
    return (PARAMETER if of_torch else make_subclass)(kind, data, requires_grad)


def _read(data: Any) -> Any:
    """Data for ``torch.tensor``: tensors of one number inside lists become that number."""
    if isinstance(data, list | tuple) and any(isinstance(x, Tensor | list | tuple) for x in data):
        return [x.item() if isinstance(x, Tensor) else _read(x) for x in data]
    return data


def _reading(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor`` for lists with fake tensors in them, in which torch finds no numbers."""
    return lambda data, *args, **kwargs: make(_read(data), *args, **kwargs)


def _storage_address(storage: torch.UntypedStorage) -> int:
    """The address of a storage: a made-up one if it has no data, 0 if it is empty."""
    if storage.device.type != "meta":
        return STORAGE_ADDRESS(storage)
    return storage._cdata if storage.nbytes() else 0


def _address(tensor: Tensor) -> int:
    """Where the first element of a tensor without data lies."""
    start = _storage_address(tensor.untyped_storage())
    return start and start + int(tensor.storage_offset()) * tensor.element_size()


@contextmanager
def behave_like_real_tensors() -> Iterator[None]:
    """Let fake tensors be converted in place, copied, pickled, formatted, and have addresses.

    Functions of ``torch.nn.init`` do nothing: there is no data, and truncated distributions would
    read theirs. Torch raises its errors without logging them at length.
    """
    init = {n: f for n, f in vars(torch.nn.init).items() if n.endswith("_") and n[:2] != "__"}
    idle = dict.fromkeys(init, lambda tensor, *args, **kwargs: tensor)
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    with (
        patch.dict(vars(torch.nn.init), idle),
        patch.multiple(torch, tensor=_reading(torch.tensor), as_tensor=_reading(torch.as_tensor)),
        patch.object(torch.nn.Module, "_apply", _apply),
        patch.object(FakeTensor, "__new__", _new),
        patch.object(torch.nn.Parameter, "__new__", _parameter),
        patch.object(FakeTensor, "data_ptr", _address),
        patch.object(torch.UntypedStorage, "data_ptr", _storage_address),
        patch.object(FakeTensor, "__format__", _format),
        patch.object(FakeTensor, "stride", MEGATRON_STRIDE),
        patch.object(Tensor, "_make_subclass", staticmethod(make_subclass)),
        patch.object(Tensor, "as_subclass", as_subclass),
        patch.object(Tensor, "__deepcopy__", _copied),
        patch.object(FakeTensor, "__deepcopy__", _deepcopy),
        patch.object(FakeTensor, "__reduce_ex__", _pickled),
        patch.object(torch_log, "disabled", True),
        scripted_as_python(),
    ):
        yield


@contextmanager
def run_uncompiled(guesses: dict[str, StackSummary]) -> Iterator[None]:
    """Run models eagerly inside the context, op by op.

    Nothing is compiled, flex_attention is one op, and nn.TransformerEncoder takes no fast path in
    inference.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _compiled_runs_eagerly(), _transformers_runs_eagerly(), flex_as_sdpa(guesses):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def modes_in_backward() -> Iterator[None]:
    """Keep the torch function modes that are on now in backward, where checkpoints run forward.

    Torch switches them off while it calls ``backward``.
    """
    modes, run = _get_current_function_mode_stack(), _engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        on = _get_current_function_mode_stack()
        with ExitStack() as stack:
            for mode in modes:
                if mode not in on:
                    stack.enter_context(mode)
            return run(*args, **kwargs)

    with patch.object(torch.autograd, "_engine_run_backward", run_backward):
        yield


@contextmanager
def _compiled_runs_eagerly() -> Iterator[None]:
    """Run functions wrapped by torch.compile without compiling them."""
    if "torch._dynamo" not in sys.modules:  # nothing was wrapped; importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _transformers_runs_eagerly() -> Iterator[None]:
    """Keep transformers from treating a fake tensor as a sign that a graph is being compiled.

    It would build causal masks that eager steps leave to the attention kernel. Its looks at token
    values are left out too: for padding, to warn of it, and for places of images, to count them.
    """
    models: Any = sys.modules.get("transformers.modeling_utils")
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1"))

        def no_graph(module: Any) -> None:
            never = patch.object(module, "is_fake_tensor", lambda value: False, create=True)
            stack.enter_context(never)

        stack.enter_context(once_imported("transformers.utils.import_utils", no_graph))
        if hasattr(models, "PreTrainedModel"):
            silent = patch.object(models.PreTrainedModel, WARNS, lambda *args: None, create=True)
            stack.enter_context(silent)
        yield


READ = torch.ops.aten._local_scalar_dense.default
MADE = torch.ops.aten.lift_fresh.default  # what torch.tensor() ends with


def run_quickly(func: OpOverload, args: Args, kwargs: Kwargs) -> Argument:
    """Run an op on fake tensors; common cases skip torch's dispatch, which is slow.

    A number that the program makes becomes a fake tensor with its value, a known number is read, a
    view shares its memory, and results of other ops are remembered.
    """
    if views_one(func) and type(args[0]) is FakeTensor and args[0].constant is None:
        return view_of(func, args, kwargs)
    if func is MADE and type(args[0]) is Tensor and not args[0].dim():
        return _number(args[0], torch._C._get_dispatch_mode(FAKE))
    if func is READ and type(args[0]) is FakeTensor and args[0].constant is not None:
        with _disable_current_modes():
            return args[0].constant.item()
    return run_remembered(func, args, kwargs)


def _number(tensor: Tensor, mode: Any) -> Tensor:
    """A fake tensor without axes that keeps its number as ``constant``."""
    with _disable_current_modes():
        form = torch.empty((), dtype=tensor.dtype, device="meta")
        fake = FakeTensor(mode, form, tensor.device, constant=tensor.clone())
    mode.fake_tensor_converter.add_constant_storage_mapping(fake)
    return fake
