"""Rewrites captured steps: replaces the tensors of calls, and inserts collectives between calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from itercast.capture.opcall import Argument, OpCall, ParamSpec, StepCapture, TensorSpec, changed

COLLECTIVE = "itercast.collective"


def collective(
    kind: str,
    axis: str,
    tensor: TensorSpec,
    phase: str,
    *,
    overlaps_next: bool = False,
    received: tuple[TensorSpec, ...] = (),
    scale: float = 1,
    routed: tuple[int, int] = (0, 0),
) -> OpCall:
    """A collective over the ranks of one axis of the plan, which compute waits for.

    The message is ``tensor``, the whole buffer as nccl-tests counts it, times ``scale``. With
    ``overlaps_next`` it runs beside the next call; compute waits only for what exceeds that call.
    With ``received`` it runs beside all calls until the first that reads one of these tensors.
    ``routed``: see ``Message``.
    """
    facts = {"kind": kind, "axis": axis, "overlaps_next": overlaps_next, "scale": scale}
    facts["routed"] = routed
    facts["until_read"] = bool(received)
    return OpCall(op=COLLECTIVE, args=(tensor,), kwargs=facts, outputs=received, phase=phase)


def fresh_storages(capture: StepCapture) -> Iterator[int]:
    """Yields storage ids that the step does not use."""
    used = (t.storage for c in capture.calls for t in c.touched)
    return count(1 + max(used, default=0))


class StepBuilder:
    """Builds a new step from a capture: calls kept or replaced in order, others put between."""

    def __init__(self, capture: StepCapture) -> None:
        self.capture = capture
        self.calls: list[OpCall] = []
        self.index: dict[int, int] = {}  # index of a call in the capture -> in the new step

    def add(self, i: int, call: OpCall) -> None:
        """Appends ``call``, which stands for call i of the capture."""
        self.calls.append(call)
        self.done(i)

    def done(self, i: int) -> None:
        """Notes that the last call so far completes what call i of the capture does."""
        self.index[i] = len(self.calls) - 1

    def step(self, parameters: Sequence[ParamSpec] | None = None) -> StepCapture:
        """Returns the new step; gradients become ready after the same calls as before."""
        moved = tuple(
            replace(p, ready_after=self.index.get(p.ready_after, p.ready_after))
            for p in (self.capture.parameters if parameters is None else parameters)
        )
        return replace(self.capture, calls=tuple(self.calls), parameters=moved)


def with_shape(t: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """The tensor in another shape, with its dimensions in the same order in memory."""
    if shape == t.shape and not t.stride:
        return t
    stride, step = [] if t.contiguous else list(t.stride), 1
    for dim in sorted(range(len(stride)), key=lambda d: (t.stride[d], -d)):
        stride[dim] = step if t.stride[dim] else 0
        step *= shape[dim] if t.stride[dim] else 1
    return changed(t, shape=shape, stride=tuple(stride))


def shard(t: TensorSpec, dim: int, parts: int) -> TensorSpec:
    """One rank's shard of a tensor along ``dim``: ceil(n / parts) of its n elements there."""
    shape = tuple(-(-n // parts) if d == dim % len(t.shape) else n for d, n in enumerate(t.shape))
    return with_shape(t, shape)


def map_tensors(value: Argument, change: Mapping[TensorSpec, TensorSpec]) -> Argument:
    """The argument with tensors, also within tuples, replaced by those that ``change`` maps to."""
    if isinstance(value, TensorSpec):
        return change.get(value, value)
    if isinstance(value, tuple):
        return tuple(map_tensors(v, change) for v in value)
    return value


def with_tensors(call: OpCall, change: Mapping[TensorSpec, TensorSpec]) -> OpCall:
    """The call with inputs and outputs replaced by ``change``; other tensors stay."""
    if not change:
        return call
    return changed(
        call, args=map_tensors(call.args, change), outputs=map_tensors(call.outputs, change)
    )
