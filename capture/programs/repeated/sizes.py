"""Sizes in the inputs and launches of a pass, separated from all else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from itercast.capture.opcall import OpCall, TensorSpec, changed
from itercast.capture.programs.repeated.forms import Form


def with_sizes(value: Any, size: Callable[[int], int]) -> Any:
    """A value with other sizes: ``size`` gives a new integer for each, in order.

    Sizes are the integers in tensors, calls and lists, but not numbers of storages.
    """
    if type(value) is int:
        return size(value)
    if type(value) in (tuple, list):
        return type(value)(with_sizes(element, size) for element in value)
    if isinstance(value, TensorSpec):
        shape, stride, nnz = with_sizes((value.shape, value.stride, value.nnz), size)
        return changed(value, shape=shape, stride=stride, nnz=nnz)
    if isinstance(value, OpCall):
        args, names, kwargs, outputs = with_sizes(
            (value.args, tuple(value.kwargs), tuple(value.kwargs.values()), value.outputs), size
        )
        named = dict(zip(names, kwargs, strict=True))
        return changed(value, args=args, kwargs=named, outputs=outputs)
    if isinstance(value, Form):
        shape, stride = with_sizes((value.shape, value.stride), size)
        return replace(value, shape=shape, stride=stride)
    return value


def without_sizes(value: Any) -> tuple[Any, list[int]]:
    """A value with 0 for each size, and its sizes."""
    sizes = list[int]()
    return with_sizes(value, lambda n: sizes.append(n) or 0), sizes  # type: ignore[func-returns-value]
