"""Ops that gradient synchronisation adds: copies and additions per parameter, and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import Args, OpCall, TensorSpec
from itercast.compose.graph.cache_reuse import cold_share
from itercast.compose.graph.layers import Layer
from itercast.compose.pricing.priced_op import Priceable, priceable
from itercast.microbench.hardware.spec import Gpu

BATCH_NORM = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
ADDED = "added"  # phase of ops that no module calls: C++ launches them
COPY_BACK_DELAY: float = assumed(__file__, "copy_back_delay")


def gradient_copies(layer: Layer, step_bytes: float, gpu: Gpu, ranks: int) -> list[list[Priceable]]:
    """Makes three ops per parameter: accumulate its gradient, copy it into a bucket, copy it back.

    A gradient is warm in cache when it is accumulated or copied into its bucket; the other tensor
    was last touched a step ago (``step_bytes``: all bytes that a step touches). The copy back comes
    after backward, ``COPY_BACK_DELAY`` of a step later on average.
    """
    cold_of = cold_share(gpu, ranks)
    gradients = [TensorSpec(shape=p.shape, dtype=p.dtype) for p in layer.parameters]
    scales = [TensorSpec(shape=(), dtype=t.dtype) for t in gradients]
    half_cold = [cold_of(step_bytes, 2.0 * t.nbytes) / 2 for t in gradients]
    after_delay = [cold_of(step_bytes * COPY_BACK_DELAY, 2.0 * t.nbytes) for t in gradients]
    kinds = (  # op, its second operands, the cold share of its bytes
        ("aten.add_.Tensor", gradients, half_cold),
        ("aten.mul.Tensor", scales, half_cold),
        ("aten.copy_.default", gradients, after_delay),
    )
    return [
        [
            priceable(_added(op, (gradient, other), gradient), cold)
            for gradient, other, cold in zip(gradients, others, colds, strict=True)
        ]
        for op, others, colds in kinds
    ]


def buffers(calls: Sequence[OpCall]) -> dict[str, list[TensorSpec]]:
    """Running statistics of batch norms in training by dtype, and their step counters (int64)."""
    by_dtype: dict[str, list[TensorSpec]] = {}
    statistics = list(_running_statistics(calls))
    for t in statistics:
        by_dtype.setdefault(t.dtype, []).append(t)
        by_dtype.setdefault("int64", [])
    if by_dtype:
        norms = len(statistics) // 2
        by_dtype["int64"] += [TensorSpec(shape=(), dtype="int64")] * norms
    return by_dtype


def _running_statistics(calls: Sequence[OpCall]) -> Iterator[TensorSpec]:
    """Running mean and variance: the fourth and fifth argument of a forward batch norm."""
    for call in calls:
        if call.phase == "forward" and call.op.split(".")[1] in BATCH_NORM:
            yield from (t for t in call.args[3:5] if isinstance(t, TensorSpec))


def buffer_copies(tensors: list[TensorSpec]) -> list[Priceable]:
    """Makes the ops that join running statistics in one buffer and copy what was received back."""
    flat = tuple(TensorSpec(shape=(t.numel,), dtype=t.dtype) for t in tensors)
    whole = TensorSpec(shape=(sum(t.numel for t in tensors),), dtype=tensors[0].dtype)
    calls = [_added("aten.cat.default", (flat,), whole)]
    calls += [_added("aten.copy_.default", (t, t), t) for t in flat]
    return [priceable(c, 0.0) for c in calls]  # as in a loop, they meet what was just touched


def _added(op: str, args: Args, output: TensorSpec) -> OpCall:
    """A call that DDP's C++ makes."""
    return OpCall(op=op, args=args, outputs=(output,), phase=ADDED, module="DDP")
