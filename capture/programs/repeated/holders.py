"""Objects that a pass is given and may change, such as caches of keys and values."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch

from itercast.capture.programs.repeated.forms import AS_THEY_ARE, opened

Told = tuple[list[Any], bytes]


def holders(values: Iterable[Any]) -> list[Any]:
    """Those of the values that can be changed: lists, dicts, and objects with attributes."""
    others = [v for v in values if not isinstance(v, (torch.Tensor, torch.nn.Module, *AS_THEY_ARE))]
    return [v for v in others if isinstance(v, list | dict) or hasattr(v, "__dict__")]


def content(holder: Any) -> Any:
    """What an object holds, without itself."""
    plain = isinstance(holder, list | dict)
    return holder.copy() if plain else vars(holder)


def put(holder: Any, held: Any) -> None:
    """Let an object hold this, and nothing else."""
    inside = holder if isinstance(holder, list | dict) else vars(holder)
    inside.clear()
    (inside.extend if isinstance(inside, list) else inside.update)(held)


def told(value: Any, known: Collection[int]) -> Told:
    """What tells a value from what it becomes, see ``opened``; it keeps no tensor alive."""
    leaves, rest = opened(value, known)
    return [weakref.ref(x) if isinstance(x, torch.Tensor) else x for x in leaves], rest


def unchanged(before: Told, value: Any, known: Collection[int]) -> bool:
    """Whether a value is as it was told before: tensors are the same, integers are equal."""
    leaves, rest = opened(value, known)
    was = [x() if isinstance(x, weakref.ref) else x for x in before[0]]
    same = (a is b or (type(a) is int and a == b) for a, b in zip(was, leaves, strict=False))
    return (len(was), before[1]) == (len(leaves), rest) and all(same)
