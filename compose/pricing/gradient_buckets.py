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
from typing import TypeVar

from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.opcall import OpCall, TensorSpec

BUCKET_BYTES = 25 * 2**20  # DDP's default
FIRST_BUCKET_BYTES = 2**20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
CONTENTION: Mapping[str, float] = assumed(__file__, "contention")  # by kind of device
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
BATCH_NORM = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")


def default_contention(gpu: Gpu) -> float:
    """Slowdown of compute and messages while they overlap: measured on the device, or assumed."""
    return gpu.contention or CONTENTION["cpu" if gpu.kind == "cpu" else "gpu"]


def fill_buckets(gradients: Iterable[tuple[K, int, T]]) -> list[tuple[K, list[T]]]:
    """Buckets of gradients as DDP fills them, in the order in which they close.

    ``gradients`` are (key, bytes, gradient) as they become ready; a bucket holds one key, at least
    the dtype. It closes with the gradient that reaches its limit: 1 MiB for the first of a key,
    then 25 MiB. What stays open closes last.
    """
    open_: dict[K, list[T]] = {}
    filled_bytes: dict[K, int] = {}
    limit_bytes: dict[K, int] = {}
    closed: list[tuple[K, list[T]]] = []
    for key, nbytes, gradient in gradients:
        open_.setdefault(key, []).append(gradient)
        filled_bytes[key] = filled_bytes.get(key, 0) + nbytes
        if filled_bytes[key] >= limit_bytes.get(key, FIRST_BUCKET_BYTES):
            closed.append((key, open_.pop(key)))
            filled_bytes[key], limit_bytes[key] = 0, BUCKET_BYTES
    return [*closed, *open_.items()]


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
