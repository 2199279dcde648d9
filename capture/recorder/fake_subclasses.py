"""Parameters of libraries' own classes over tensors without data, as quantised weights are.

Torch makes no instance of another class over the memory of a fake tensor. Here the new tensor gets
a class that is both.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

MAKE = Tensor._make_subclass


def make_subclass(kind: Any, data: Tensor, require_grad: bool = False, **options: Any) -> Tensor:
    """What ``Tensor._make_subclass`` does, of fake tensors too; those share ``data``'s memory."""
    if not isinstance(data, FakeTensor):
        as_torch: Tensor = MAKE(kind, data, require_grad, **options)
        return as_torch
    made: Any = data.detach()
    made.__class__ = _also_fake(kind)
    made._is_param = issubclass(kind, torch.nn.Parameter)
    found: Tensor = made.requires_grad_(require_grad)
    return found


@cache
def _also_fake(kind: Any) -> Any:
    """A class of both, named as the library's; the class itself if it is such a one."""
    if issubclass(kind, FakeTensor):
        return kind
    return type(kind)(kind.__name__, (kind, FakeTensor), {"__module__": kind.__module__})
