"""Fake copies of modules and tensors: the same shapes, strides and dtypes without data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.opcall import Args, Argument, Kwargs
from itercast.capture.recorder.sparse import check_layouts, fake_sparse, is_sparse

Module = TypeVar("Module", bound=torch.nn.Module)
Made = TypeVar("Made")
DEVICE = torch.ops.prim.device.default
MAKE_SUBCLASS, AS_SUBCLASS = Tensor._make_subclass, Tensor.as_subclass


def fake_module(module: Module, dtype: torch.dtype | None = None) -> Module:
    """A copy of a module with fake tensors on the CPU; strides and tied weights are kept.

    Floating-point tensors take ``dtype`` if one is given. ValueError for a module that cannot be
    copied, or has a tensor in an unknown layout.
    """
    memo: dict[int, Tensor] = {}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    check_layouts((f"{type(module).__name__}.{name}", tensor) for name, tensor in tensors)
    for _, tensor in tensors:
        if not isinstance(tensor, FakeTensor):
            memo[id(tensor)] = fake_tensor(tensor, dtype)
    if not memo:
        return copy.copy(module)
    with _disable_current_modes():
        try:
            return copy.deepcopy(module, memo)
        except (TypeError, RuntimeError) as exc:
            raise ValueError(f"cannot copy the structure of the module: {exc}") from exc


def build_fake_else_real(build: Callable[[], Made]) -> Made:
    """Call ``build`` under the current fake mode; without it if it reads values of tensors.

    An example is timm's rate of dropped layers, a number read off ``torch.linspace``. Weights have
    no initial values even then.
    """
    try:
        return build()
    except (DataDependentOutputException, DynamicOutputShapeException):
        with _disable_current_modes():
            return build()


def fake_tensor(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor or parameter of the same shape and layout under the current fake mode.

    Floating-point tensors take ``dtype`` if one is given.
    """
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if is_sparse(tensor):
        new = fake_sparse(tensor, dtype).requires_grad_(tensor.requires_grad)
    else:
        is_fake = isinstance(tensor, FakeTensor)  # whose copy is on the same device
        make = tensor.new_empty_strided if is_fake else torch.empty_strided
        new = make(tensor.size(), tensor.stride(), dtype=dtype, requires_grad=tensor.requires_grad)
    parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(new, tensor.requires_grad) if parameter else new


def make_subclass(kind: Any, data: Tensor, require_grad: bool = False, **options: Any) -> Tensor:
    """What ``Tensor._make_subclass`` does, of fake tensors too; those share ``data``'s memory.

    Libraries' quantised weights are parameters of a class of their own. Torch makes no instance of
    it over a fake tensor's memory, so that the new tensor gets a class that is both.
    """
    if not isinstance(data, FakeTensor):
        as_torch: Tensor = MAKE_SUBCLASS(kind, data, require_grad, **options)
        return as_torch
    tensor: Any = data.detach()
    tensor.__class__ = _also_fake(kind)
    tensor._is_param = issubclass(kind, torch.nn.Parameter)
    result: Tensor = tensor.requires_grad_(require_grad)
    return result


def as_subclass(tensor: Tensor, kind: Any) -> Tensor:
    """As ``Tensor.as_subclass``; a fake tensor's class becomes both (as in ``make_subclass``)."""
    if not isinstance(tensor, FakeTensor) or issubclass(FakeTensor, kind):
        as_torch: Tensor = AS_SUBCLASS(tensor, kind)
        return as_torch
    same: Any = tensor.view_as(tensor)
    same.__class__ = _also_fake(kind)
    result: Tensor = same
    return result


@cache
def _also_fake(kind: Any) -> Any:
    """A subclass of ``kind`` and FakeTensor that is named as ``kind``; ``kind`` if it is fake."""
    if issubclass(kind, FakeTensor):
        return kind
    return type(kind)(kind.__name__, (kind, FakeTensor), {"__module__": kind.__module__})


def asked_of(func: OpOverload, args: Args, kwargs: Kwargs) -> Argument:
    """The answer of an op of ``prim``, a question about a tensor; a fake one's device quickly.

    Torch asks for it several times for each op.
    """
    is_fake = func is DEVICE and type(args[0]) is FakeTensor
    if is_fake and not args[0].fake_mode.in_kernel_invocation:
        return args[0].fake_device
    return func(*args, **kwargs)


def below_transforms(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers that transforms of ``torch.func`` put around it."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor
