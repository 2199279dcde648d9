"""Ops of libraries whose results are as long as data say, such as fbgemm's of jagged tensors."""

from __future__ import annotations

from math import ceil
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.fake_impl import FakeImplCtx
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from itercast.capture.opcall import Args, Argument, Kwargs
from itercast.capture.recorder.facts import KNOWN_LIMIT, Fact, Known, is_small_integer


def as_integers_say(known: Known, func: OpOverload, args: Args, kwargs: Kwargs) -> Argument:
    """Results of a library's op whose lengths follow from known integers; None where they do not.

    The op runs for real, once with zeros in all other tensors, once with ones: if shapes or
    integers of the results differ, they depend on unknown numbers. None also if the op has no
    kernel for CPUs, or refuses such numbers.
    """
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    facts = [known.fact(t) for t in tensors if is_small_integer(t)]
    unknown = [fact is None or fact.values is None for fact in facts]
    if not facts or any(unknown) or any(t.numel() > KNOWN_LIMIT for t in tensors):
        return None

    def run(number: int) -> Any:
        def real(tensor: Tensor) -> Tensor:
            fact = known.fact(tensor) if is_small_integer(tensor) else None
            other = torch.full(tensor.shape, number, dtype=tensor.dtype)
            return other if fact is None or fact.values is None else fact.values

        with _disable_current_modes():
            return func(*tree_map_only(Tensor, real, args), **tree_map_only(Tensor, real, kwargs))

    try:
        results, others = run(0), run(1)
    except RuntimeError:
        return None
    with _disable_current_modes():
        for one, other in zip(tree_leaves(results), tree_leaves(others), strict=True):
            same = one.shape == other.shape
            if not same or (is_small_integer(one) and not one.equal(other)):
                return None

    def without_data(values: Tensor) -> Tensor:
        tensor = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype)
        if is_small_integer(values):
            known.facts[tensor] = Fact(values=values)
        return tensor

    return tree_map_only(Tensor, without_data, results)


def of_guessed_length(share: float, func: OpOverload, args: Args, kwargs: Kwargs) -> Argument:
    """Results of an op of unknown length: ``share`` of the rows of its largest input, a guess.

    The elements of a vector are rows; in other tensors each slice along the last axis is one.
    """
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    rows = max((t[..., 0].numel() if t.dim() > 1 else t.numel() for t in tensors), default=1)
    length = ceil(share * rows)
    with patch.object(FakeImplCtx, "new_dynamic_size", lambda context, **bounds: length):
        return func(*args, **kwargs)


def of_length(tensor: Tensor, lengths: list[int], axis: int = 0) -> Tensor:
    """A tensor of guessed length, corrected to the sum of the ``lengths`` it is split into."""
    shape = list(tensor.shape)
    shape[axis] = sum(lengths)
    if shape == list(tensor.shape) or tensor.requires_grad:  # a new one has no history
        return tensor
    return tensor.new_empty(shape)
