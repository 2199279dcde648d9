"""Frozen linear layers whose weights are stored in 4 bits (QLoRA, arXiv:2305.14314).

As in bitsandbytes, one kernel expands a matrix to the dtype of the other factor before each product
that reads it, forward and backward, and the expanded matrix is then freed. The head, and all but
the linear layers of blocks, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import OpCall, ParamSpec, StepCapture, TensorSpec
from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.graph.product_roles import LINEAR_PRODUCTS, weight_copies
from itercast.compose.graph.rewrite import StepBuilder, fresh_storages, with_tensors
from itercast.microbench.ops.memory.fused import CALL

# Of codes, of scales and, if these are quantised too, of their scales: bits, for so many numbers.
STORED: Mapping[str, Sequence[tuple[int, int]]] = assumed(__file__, "stored")
OPS = 2  # no assumption: a code's number from a table, times its scale


@cached_by_identity
def with_quantised_weights(capture: StepCapture, kind: str) -> StepCapture:
    """The step with the frozen weights of its blocks' linear layers in ``kind``, nf4 or nf4-dq.

    ValueError if it has none.
    """
    copies = weight_copies(capture)
    stored = {p.storage: p for p in _quantised(capture, copies, kind)}
    if not stored:
        raise ValueError(f"weights {kind!r}: the model has no frozen linear layers in blocks")
    builder, fresh = StepBuilder(capture), fresh_storages(capture)
    for i, call in enumerate(capture.calls):
        if call.outputs and copies.get(call.outputs[0].storage) in stored:
            builder.done(i)  # autocast's copy: the matrix is made in that dtype
            continue
        factor = _factor(call)
        p = stored.get(copies.get(factor.storage, factor.storage)) if factor else None
        if factor and p:
            whole = replace(factor, storage=next(fresh))
            builder.calls += _made_whole(p, whole, kind, fresh, call)
            call = with_tensors(call, {factor: whole})
        builder.add(i, call)
    return builder.step([stored.get(p.storage, p) for p in capture.parameters])


def _quantised(capture: StepCapture, copies: Mapping[int, int], kind: str) -> Iterator[ParamSpec]:
    """The frozen matrices of blocks that linear layers multiply by, as they are stored."""
    factors = {f.storage for f in map(_factor, capture.calls) if f}
    factors |= {copies[s] for s in factors if s in copies}
    for p in capture.parameters:
        if p.layer and len(p.shape) == 2 and p.ready_after < 0 and p.storage in factors:
            bits = sum(bits / numbers for bits, numbers in STORED[kind])
            yield replace(p, shape=(p.shape[0], ceil(p.shape[1] * bits / 8)), dtype="uint8")


def _factor(call: OpCall) -> TensorSpec | None:
    """The second factor of a matrix product, where linear layers have their weight."""
    return call.args[-1] if call.op in LINEAR_PRODUCTS else None


def _made_whole(
    p: ParamSpec, whole: TensorSpec, kind: str, fresh: Iterator[int], user: OpCall
) -> Iterator[OpCall]:
    """The kernel that expands a quantised matrix; two more before it if scales are quantised too.

    ``p``: the matrix in ``kind``; ``whole``: the matrix as the product ``user`` reads it.
    """
    codes = TensorSpec(shape=p.shape, dtype=p.dtype, storage=p.storage)
    read: tuple[TensorSpec, ...] = (codes,)
    if len(STORED[kind]) > 2:
        _, (_, block), _ = STORED[kind]
        numbers = ceil(whole.numel / block)
        scales = TensorSpec(shape=(numbers,), dtype="fp32", storage=next(fresh))
        yield _kernel((replace(scales, dtype="uint8", storage=p.storage),), scales, user)
        yield _kernel((scales,), scales, user)  # adds their mean
        read = (replace(codes, shape=(ceil(whole.numel / 2),)), scales)
    yield _kernel(read, whole, user)


def _kernel(read: tuple[TensorSpec, ...], written: TensorSpec, user: OpCall) -> OpCall:
    """A pointwise kernel before ``user`` that reads codes or scales and writes numbers."""
    facts = {"ops": OPS, "numel": written.numel}
    return OpCall(
        op=CALL, args=read, kwargs=facts, outputs=(written,), phase=user.phase, module=user.module
    )
