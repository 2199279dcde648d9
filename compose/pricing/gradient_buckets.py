"""Gradient buckets of PyTorch DDP, all-reduced while backward goes on.

What DDP adds to a step, as a profile of torch 2.13 shows it:

- before forward, buffers (running statistics) are broadcast, a message per dtype, and copied back;
- each gradient is multiplied by 1/world size into its bucket as soon as it is ready;
- a full bucket is all-reduced on the communication lane, in bucket order;
- after backward, each bucket is awaited and its gradients are copied back.

While an all-reduce and compute overlap both proceed at 1/contention of their speed
(``timeline.simulate_shared``). The factor is the device's where it was measured
(``sweep.contention``), else ``CONTENTION``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.pricing.collectives import Message
from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.opcall import OpCall, ParamSpec, StepCapture, TensorSpec

DEFAULT_BUCKET_BYTES = 25 * 2**20  # DDP's default
FIRST_BUCKET_BYTES = 2**20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
CONTENTION: Mapping[str, float] = assumed(__file__, "contention")  # by kind of device
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
BATCH_NORM = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients reduced together; ready after call number ``ready_after`` of the step."""

    message_bytes: int
    dtype: str
    ready_after: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """A collective that overlaps calls: it starts after call ``after``, ``before`` waits for it."""

    message: Message
    after: int
    before: int


def default_contention(gpu: Gpu) -> float:
    """Slowdown of compute and messages while they overlap: measured on the device, or assumed."""
    return gpu.contention or CONTENTION["cpu" if gpu.kind == "cpu" else "gpu"]


def fill_buckets(
    gradients: Iterable[tuple[K, int, T]], bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> list[tuple[K, list[T]]]:
    """Buckets of gradients as DDP fills them, in the order in which they close.

    ``gradients`` are (key, bytes, gradient) as they become ready; a bucket holds one key, at least
    the dtype. It closes with the gradient that reaches its limit: 1 MiB for the first of a key
    (where the default of 25 MiB is kept), then ``bucket_bytes``. What stays open closes last.
    """
    first_bytes = FIRST_BUCKET_BYTES if bucket_bytes == DEFAULT_BUCKET_BYTES else bucket_bytes
    open_: dict[K, list[T]] = {}
    filled_bytes: dict[K, int] = {}
    limit_bytes: dict[K, int] = {}
    closed: list[tuple[K, list[T]]] = []
    for key, nbytes, gradient in gradients:
        open_.setdefault(key, []).append(gradient)
        filled_bytes[key] = filled_bytes.get(key, 0) + nbytes
        if filled_bytes[key] >= limit_bytes.get(key, first_bytes):
            closed.append((key, open_.pop(key)))
            filled_bytes[key], limit_bytes[key] = 0, bucket_bytes
    return [*closed, *open_.items()]


def buckets(
    parameters: Sequence[ParamSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> list[Bucket]:
    """Buckets in the order their gradients become ready, as DDP rebuilds them after a step.

    One dtype per bucket. Parameters without a gradient (``ready_after`` < 0) are left out.
    """
    trained = sorted((p for p in parameters if p.ready_after >= 0), key=lambda p: p.ready_after)
    closed = fill_buckets(((p.dtype, p.nbytes, p) for p in trained), bucket_bytes)
    found = [
        Bucket(
            message_bytes=sum(p.nbytes for p in members),
            dtype=dtype,
            ready_after=members[-1].ready_after,
            names=tuple(p.name for p in members),
        )
        for dtype, members in closed
    ]
    return sorted(found, key=lambda b: b.ready_after)


@cached_by_identity
def ddp_step(capture: StepCapture) -> tuple[StepCapture, list[Sync]]:
    """The step with the calls that DDP adds (see the top of this file), and its collectives.

    ValueError where a gradient is ready after the last call.
    """
    late = max(capture.parameters, key=lambda p: p.ready_after, default=None)
    if late is not None and late.ready_after >= len(capture.calls):
        raise ValueError(
            f"gradient {late.name!r} is ready after call {late.ready_after}, "
            f"the step has {len(capture.calls)} calls"
        )
    by_name = {p.name: p for p in capture.parameters}
    storages = _Storages(capture)
    calls, syncs = _broadcasts(capture, storages)
    new_index: list[int] = []
    due: dict[int, list[ParamSpec]] = {}
    for p in capture.parameters:
        due.setdefault(p.ready_after, []).append(p)
    for i, call in enumerate(capture.calls):
        calls.append(call)
        gradients = [storages.gradient(p, i) for p in due.get(i, [])]
        calls += [_into_bucket(g, storages) for g in gradients]
        new_index.append(len(calls) - 1)
    first = _after_backward(calls)
    back: list[OpCall] = []
    for bucket in buckets(capture.parameters):
        message = Message(
            kind="all_reduce", axis="dp", message_bytes=bucket.message_bytes, dtype=bucket.dtype
        )
        after = new_index[bucket.ready_after]
        syncs.append(Sync(message=message, after=after, before=first + len(back)))
        members = [by_name[name] for name in bucket.names]
        back += [_copy(storages.gradient(p, p.ready_after), storages, "backward") for p in members]
    calls[first:first] = back
    return replace(capture, calls=tuple(calls)), syncs


def _broadcasts(capture: StepCapture, storages: _Storages) -> tuple[list[OpCall], list[Sync]]:
    """Before forward: buffers joined, broadcast and copied back, a message per dtype."""
    calls: list[OpCall] = []
    syncs: list[Sync] = []
    for dtype, tensors in buffers(capture.calls).items():
        message = Message(
            kind="broadcast",
            axis="dp",
            message_bytes=sum(t.nbytes for t in tensors),
            dtype=dtype,
            phase="forward",
        )
        syncs.append(Sync(message=message, after=len(calls), before=len(calls) + 1))
        calls.append(_gather(tensors, storages))
        calls += [_copy(t, storages, "forward") for t in tensors]
    return calls, syncs


def _after_backward(calls: Sequence[OpCall]) -> int:
    """Index of the first call after the last of backward."""
    return max((i + 1 for i, c in enumerate(calls) if c.phase == "backward"), default=len(calls))


class _Storages:
    """Storages of gradients, and new storages that the capture does not use."""

    def __init__(self, capture: StepCapture) -> None:
        self.calls = capture.calls
        tensors = (t for c in capture.calls for t in (*c.tensors(), *c.outputs))
        self.next = 1 + max((t.storage for t in tensors), default=0)
        self.gradients: dict[str, TensorSpec] = {}

    def fresh(self) -> int:
        """A storage that no tensor has."""
        self.next += 1
        return self.next

    def gradient(self, p: ParamSpec, at: int) -> TensorSpec:
        """A parameter's gradient: the last output of its size before call ``at``, or new memory."""
        if p.name not in self.gradients:
            taken = {t.storage for t in self.gradients.values()}
            made = (t for c in reversed(self.calls[max(0, at - 8) : at + 1]) for t in c.outputs)
            fits = (t for t in made if t.nbytes == p.nbytes and t.storage not in taken)
            storage = next((t.storage for t in fits), -1)
            storage = self.fresh() if storage < 0 else storage
            self.gradients[p.name] = TensorSpec(shape=p.shape, dtype=p.dtype, storage=storage)
        return self.gradients[p.name]


def _into_bucket(gradient: TensorSpec, storages: _Storages) -> OpCall:
    scale = TensorSpec(shape=(), dtype=gradient.dtype, storage=-1)
    view = replace(gradient, storage=storages.fresh())
    args = (gradient, scale)
    return OpCall(op="aten.mul.Tensor", args=args, outputs=(view,), phase="backward", module="DDP")


def _copy(t: TensorSpec, storages: _Storages, phase: str) -> OpCall:
    """A copy of what was received into a tensor."""
    args = (t, replace(t, storage=storages.fresh()))
    return OpCall(op="aten.copy_.default", args=args, outputs=(t,), phase=phase, module="DDP")


def _gather(tensors: Sequence[TensorSpec], storages: _Storages) -> OpCall:
    """A concatenation of small tensors into one buffer."""
    flat = tuple(replace(t, shape=(t.numel,), stride=()) for t in tensors)
    numel = sum(t.numel for t in tensors)
    whole = TensorSpec(shape=(numel,), dtype=tensors[0].dtype, storage=storages.fresh())
    return OpCall(
        op="aten.cat.default", args=(flat,), outputs=(whole,), phase="forward", module="DDP"
    )


def buffers(calls: Sequence[OpCall]) -> dict[str, list[TensorSpec]]:
    """Running statistics of batch norms in training by dtype, and their step counters."""
    found: dict[str, list[TensorSpec]] = {}
    for t in _running(calls):
        found.setdefault(t.dtype, []).append(t)
        found.setdefault("int64", [])
    if found:
        norms = sum(len(t) for t in found.values()) // 2
        found["int64"] += [TensorSpec(shape=(), dtype="int64")] * norms
    return found


def _running(calls: Sequence[OpCall]) -> Iterator[TensorSpec]:
    """Running mean and variance: the fourth and fifth argument of a forward batch norm."""
    for call in calls:
        if call.phase == "forward" and call.op.split(".")[1:2] in [[n] for n in BATCH_NORM]:
            yield from (t for t in call.args[3:5] if isinstance(t, TensorSpec))
