"""Rebuilding a captured step with calls changed and collectives between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from microbench.opcall import OpCall, ParamSpec, StepCapture, TensorSpec

COLLECTIVE = "itercast.collective"


def collective(
    kind: str, axis: str, tensor: TensorSpec, phase: str, *, behind: bool = False, scale: float = 1
) -> OpCall:
    """A collective compute waits for; ``tensor`` is its whole buffer, times ``scale``.

    With ``behind`` it runs while the next call computes, and only what is longer is waited for.
    """
    facts = {"kind": kind, "axis": axis, "behind": behind, "scale": scale}
    return OpCall(op=COLLECTIVE, args=(tensor,), kwargs=facts, phase=phase)


def fresh_storages(capture: StepCapture) -> Iterator[int]:
    """Names of memory that the step does not use."""
    used = (t.storage for c in capture.calls for t in (*c.tensors(), *c.outputs))
    return count(1 + max(used, default=0))


class Builder:
    """A step under construction: calls copied from a capture, and others put between them."""

    def __init__(self, capture: StepCapture) -> None:
        self.capture = capture
        self.calls: list[OpCall] = []
        self.index: dict[int, int] = {}  # call of the capture -> call of the new step

    def keep(self, i: int, call: OpCall) -> None:
        """``call`` stands for call i of the capture."""
        self.index[i] = len(self.calls)
        self.calls.append(call)

    def done(self, parameters: Sequence[ParamSpec]) -> StepCapture:
        """The new step; gradients are ready where they were."""
        moved = tuple(
            replace(p, ready_after=self.index.get(p.ready_after, p.ready_after)) for p in parameters
        )
        return replace(self.capture, calls=tuple(self.calls), parameters=moved)


def with_shape(t: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """The tensor in another shape, its dimensions in the same order in memory."""
    if t.contiguous:
        return replace(t, shape=shape, stride=())
    stride, step = list(t.stride), 1
    for dim in sorted(range(len(shape)), key=lambda d: (t.stride[d], -d)):
        stride[dim] = step if t.stride[dim] else 0
        step *= shape[dim] if t.stride[dim] else 1
    return replace(t, shape=shape, stride=tuple(stride))


def cut(t: TensorSpec, dim: int, parts: int) -> TensorSpec:
    """A rank's part of a tensor; the last ranks' smaller parts are rounded up."""
    shape = tuple(-(-n // parts) if d == dim % len(t.shape) else n for d, n in enumerate(t.shape))
    return with_shape(t, shape)


def map_tensors(value: Any, change: Mapping[TensorSpec, TensorSpec]) -> Any:
    """Arguments with tensors exchanged."""
    if isinstance(value, TensorSpec):
        return change.get(value, value)
    if isinstance(value, tuple):
        return tuple(map_tensors(v, change) for v in value)
    return value


def changed(call: OpCall, change: Mapping[TensorSpec, TensorSpec]) -> OpCall:
    """The call on other tensors."""
    return replace(
        call, args=map_tensors(call.args, change), outputs=map_tensors(call.outputs, change)
    )
