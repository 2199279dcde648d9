"""Modules and tensors without their data: what a capture runs in place of the real ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import _disable_current_modes


def without_data(module: Any, dtype: torch.dtype | None = None) -> Any:
    """The same module with fake tensors on the CPU, strides and ties kept.

    Floating-point tensors take ``dtype`` if one is given; ValueError for what cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, FakeTensor):
            memo[id(tensor)] = fake(tensor, dtype)
    if not memo:
        return copy.copy(module)
    with _disable_current_modes():
        try:
            return copy.deepcopy(module, memo)
        except (TypeError, RuntimeError) as exc:
            raise ValueError(f"cannot copy the structure of the module: {exc}") from exc


def made_to_be_read(make: Callable[[], Any]) -> Any:
    """What ``make`` returns; with data where it reads numbers off tensors (timm's drop paths).

    Weights have no initial values even then.
    """
    try:
        return make()
    except (DataDependentOutputException, DynamicOutputShapeException):
        with _disable_current_modes():
            return make()


def fake(tensor: Any, dtype: torch.dtype | None) -> Any:
    """A tensor or parameter of the same form under the current fake mode."""
    new = torch.empty_strided(
        tensor.size(),
        tensor.stride(),
        dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype,
        requires_grad=tensor.requires_grad,
    )
    parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(new, tensor.requires_grad) if parameter else new
