"""Captured steps stored on disk as gzip JSON, which is read without torch and never executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from itercast.capture.base.cache_folder import kept, packed, unpacked
from itercast.capture.opcall import OpCall, ParamSpec, StepCapture, TensorSpec

MARKS = {TensorSpec: "#t", OpCall: "#c", ParamSpec: "#p", StepCapture: "#s"}
MARKED = {mark: (kind, [f.name for f in fields(kind)]) for kind, mark in MARKS.items()}

PLAIN = (int, str, float, bool, type(None))


def pack(value: Any) -> Any:
    """A capture, or a part of it, as plain values: a dataclass is ``{mark: [its fields]}``."""
    if type(value) in PLAIN:
        return value
    if mark := MARKS.get(type(value)):
        return {mark: [pack(getattr(value, name)) for name in MARKED[mark][1]]}
    if isinstance(value, tuple | list):
        return [pack(v) for v in value]
    return {k: pack(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def unpack(value: Any, known_tensors: dict[TensorSpec, TensorSpec] | None = None) -> Any:
    """The value that ``pack`` was given, with tuples for lists; equal tensors are one object."""
    tensors = {} if known_tensors is None else known_tensors
    if isinstance(value, list):
        return tuple([unpack(v, tensors) for v in value])
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (marked := MARKED.get(next(iter(value)))):
        kind, names = marked
        (row,) = value.values()
        result = kind(**dict(zip(names, [unpack(v, tensors) for v in row], strict=True)))
        return tensors.setdefault(result, result) if kind is TensorSpec else result
    return {k: unpack(v, tensors) for k, v in value.items()}


def dumps(capture: StepCapture) -> bytes:
    """The capture as gzip JSON."""
    return packed(pack(capture))


def loads(data: bytes) -> StepCapture:
    """The capture that ``dumps`` wrote; ValueError for anything else."""
    try:
        capture = unpack(unpacked(data))
    except (ValueError, TypeError) as exc:
        raise ValueError(f"not a captured step: {exc}") from exc
    if not isinstance(capture, StepCapture):
        raise ValueError("not a captured step")
    return capture


def cached(key: str, make: Callable[[], StepCapture], folder: Path) -> StepCapture:
    """The capture stored under ``key``; it is made and stored if it is missing or unreadable."""
    return kept(folder / f"{key}.json.gz", make, dumps, loads)
