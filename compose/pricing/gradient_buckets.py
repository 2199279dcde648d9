"""Data parallelism as PyTorch DDP does it: gradient buckets, reduced while backward goes on.

What DDP adds to a step, as a profile of torch 2.13 shows it:

- before forward, buffers (running statistics) are broadcast, a message per dtype, and copied back;
- each gradient is multiplied by 1/world size into its bucket as soon as it is ready;
- a full bucket is all-reduced on the communication lane, in bucket order;
- after backward, each bucket is awaited and its gradients are copied back.

While an all-reduce and compute overlap both proceed at 1/contention of their speed
(``timeline.simulate_shared``). The factor is the device's where it was measured
(``sweep.contention``), else stated: 1.0 on GPUs (copy engines and few SMs), 2.0 on a CPU,
where both run on the same cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compose.graph.identity_cache import remembered
from compose.pricing.collectives import Message
from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall, ParamSpec, StepCapture, TensorSpec

DEFAULT_BUCKET_BYTES = 25 * 2**20  # DDP's default
FIRST_BUCKET_BYTES = 2**20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
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
    """A collective beside the calls: starts after call ``after``, call ``before`` waits for it."""

    message: Message
    after: int
    before: int


def default_contention(gpu: Gpu) -> float:
    """The device's, or what is stated at the top of this file."""
    return gpu.contention or (2.0 if gpu.kind == "cpu" else 1.0)


def buckets(
    parameters: Sequence[ParamSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> list[Bucket]:
    """Buckets in the order their gradients become ready, as DDP rebuilds them after a step.

    A bucket closes with the gradient that reaches its limit: 1 MiB for the first (where the
    default of 25 MiB is kept), then ``bucket_bytes``; one dtype per bucket. Parameters without a
    gradient (``ready_after`` < 0) are left out.
    """
    small_first = bucket_bytes == DEFAULT_BUCKET_BYTES
    first = FIRST_BUCKET_BYTES if small_first else bucket_bytes
    open_: dict[str, list[ParamSpec]] = {}
    filled: dict[str, int] = {}
    limit: dict[str, int] = {}
    closed: list[list[ParamSpec]] = []
    for p in sorted((p for p in parameters if p.ready_after >= 0), key=lambda p: p.ready_after):
        open_.setdefault(p.dtype, []).append(p)
        filled[p.dtype] = filled.get(p.dtype, 0) + p.nbytes
        if filled[p.dtype] >= limit.get(p.dtype, first):
            closed.append(open_.pop(p.dtype))
            filled[p.dtype], limit[p.dtype] = 0, bucket_bytes
    closed += open_.values()
    found = [
        Bucket(
            message_bytes=sum(m.nbytes for m in members),
            dtype=members[0].dtype,
            ready_after=members[-1].ready_after,
            names=tuple(m.name for m in members),
        )
        for members in closed
    ]
    return sorted(found, key=lambda b: b.ready_after)


@remembered
def ddp_step(capture: StepCapture) -> tuple[StepCapture, list[Sync]]:
    """The step with what DDP adds (see the top of this file), and its collectives.

    ValueError where a gradient is ready after the last call.
    """
    late = max(capture.parameters, key=lambda p: p.ready_after, default=None)
    if late is not None and late.ready_after >= len(capture.calls):
        raise ValueError(
            f"gradient {late.name!r} is ready after call {late.ready_after}, "
            f"the step has {len(capture.calls)} calls"
        )
    found = buckets(capture.parameters)
    by_name = {p.name: p for p in capture.parameters}
    fresh = _Storages(capture)
    calls: list[OpCall] = []
    syncs: list[Sync] = []
    for dtype, tensors in buffers(capture.calls).items():
        size = sum(t.nbytes for t in tensors)
        message = Message(
            kind="broadcast", axis="dp", message_bytes=size, dtype=dtype, phase="forward"
        )
        syncs.append(Sync(message=message, after=len(calls), before=len(calls) + 1))
        calls.append(_gather(tensors, fresh))
        calls += [_copy(t, fresh, "forward") for t in tensors]
    new_index: list[int] = []
    due: dict[int, list[ParamSpec]] = {}
    for p in capture.parameters:
        due.setdefault(p.ready_after, []).append(p)
    for i, call in enumerate(capture.calls):
        calls.append(call)
        gradients = [fresh.gradient(p, i) for p in due.get(i, [])]
        calls += [_into_bucket(g, fresh) for g in gradients]
        new_index.append(len(calls) - 1)
    first = _after_backward(calls)
    back: list[OpCall] = []
    for bucket in found:
        message = Message(
            kind="all_reduce", axis="dp", message_bytes=bucket.message_bytes, dtype=bucket.dtype
        )
        after = new_index[bucket.ready_after]
        syncs.append(Sync(message=message, after=after, before=first + len(back)))
        members = [by_name[name] for name in bucket.names]
        back += [_copy(fresh.gradient(p, p.ready_after), fresh, "backward") for p in members]
    calls[first:first] = back
    return replace(capture, calls=tuple(calls)), syncs


def _after_backward(calls: Sequence[OpCall]) -> int:
    """Index of the first call after the last of backward."""
    return max((i + 1 for i, c in enumerate(calls) if c.phase == "backward"), default=len(calls))


class _Storages:
    """Gradients of parameters, and names for memory that the capture does not know."""

    def __init__(self, capture: StepCapture) -> None:
        self.calls = capture.calls
        tensors = (t for c in capture.calls for t in (*c.tensors(), *c.outputs))
        self.next = 1 + max((t.storage for t in tensors), default=0)
        self.known: dict[str, TensorSpec] = {}

    def fresh(self) -> int:
        """A storage nobody has."""
        self.next += 1
        return self.next

    def gradient(self, p: ParamSpec, at: int) -> TensorSpec:
        """The gradient as the last calls up to ``at`` left it; fresh memory where none fits."""
        if p.name not in self.known:
            taken = {t.storage for t in self.known.values()}
            made = (t for c in reversed(self.calls[max(0, at - 8) : at + 1]) for t in c.outputs)
            fits = (t for t in made if t.nbytes == p.nbytes and t.storage not in taken)
            storage = next((t.storage for t in fits), -1)
            storage = self.fresh() if storage < 0 else storage
            self.known[p.name] = TensorSpec(shape=p.shape, dtype=p.dtype, storage=storage)
        return self.known[p.name]


def _into_bucket(gradient: TensorSpec, fresh: _Storages) -> OpCall:
    scale = TensorSpec(shape=(), dtype=gradient.dtype, storage=-1)
    view = replace(gradient, storage=fresh.fresh())
    args = (gradient, scale)
    return OpCall(op="aten.mul.Tensor", args=args, outputs=(view,), phase="backward", module="DDP")


def _copy(t: TensorSpec, fresh: _Storages, phase: str) -> OpCall:
    """A tensor overwritten with what was received."""
    args = (t, replace(t, storage=fresh.fresh()))
    return OpCall(op="aten.copy_.default", args=args, outputs=(t,), phase=phase, module="DDP")


def _gather(tensors: Sequence[TensorSpec], fresh: _Storages) -> OpCall:
    """Small tensors joined in one buffer."""
    flat = tuple(replace(t, shape=(t.numel,), stride=()) for t in tensors)
    numel = sum(t.numel for t in tensors)
    whole = TensorSpec(shape=(numel,), dtype=tensors[0].dtype, storage=fresh.fresh())
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
