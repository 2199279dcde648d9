"""Runs the linear layers and experts of a captured step in fp8 or 4 bits, as Transformer Engine.

Those of a compiled step cast as torchao's (``itercast.compose.graph.compiled.torchao_casts``).
fp8, nvfp4 and mxfp4 have the same products: forward, gradients of inputs and of weights. A cast to
nvfp4 is two kernels, since the scale of the matrix is known after its largest number.
"""

from __future__ import annotations

from dataclasses import replace

from itercast.capture.opcall import ELEMENT_BYTES, OpCall, StepCapture, TensorSpec
from itercast.compose.graph.compiled.torchao_casts import CAST, LARGEST
from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.graph.product_roles import LINEAR_PRODUCTS, alias_weight_casts
from itercast.compose.graph.rewrite import StepBuilder, fresh_storages, with_tensors
from itercast.compose.parallel.ep import expert_weights
from itercast.microbench.ops.matrix.gemm import GROUPED


@cached_by_identity
def with_narrow_products(capture: StepCapture, dtype: str) -> StepCapture:
    """The step with the products of its blocks' linear layers in ``dtype``; ValueError if none are.

    Blocks are modules with a number in their name (``layers.3``): embeddings and heads stay in
    bf16, as in Megatron-LM. Each activation and gradient that such a product reads is cast once.
    Not counted: casts of weights (once per step), casts fused into the norm before a linear layer.
    """
    capture = alias_weight_casts(capture)
    weights = _narrow_weights(capture)
    shapes = {p.shape for p in capture.parameters if p.storage in weights}
    multiplied: set[int] = set()  # activations that one of these weights multiplied
    narrow_copy: dict[int, int] = {}  # storage -> storage of its copy in ``dtype``
    builder, fresh = StepBuilder(capture), fresh_storages(capture)
    for i, call in enumerate(capture.calls):
        factors = _factors(call)
        by_weight = bool(factors) and factors[1].storage in weights
        is_input = any(t.storage in multiplied for t in factors)
        weight_gradient = is_input and call.outputs[0].shape in shapes
        if by_weight or weight_gradient:
            for t in factors:
                if t.storage not in weights | narrow_copy.keys():
                    narrow_copy[t.storage] = next(fresh)
                    builder.calls += _cast(t, narrow_copy[t.storage], call, dtype)
            if by_weight and call.phase != "backward":
                multiplied.add(factors[0].storage)
            # Their narrow copies are read, or they themselves where they are weights.
            read = {t: narrow_copy.get(t.storage, t.storage) for t in factors}
            narrow = {t: replace(t, dtype=dtype, storage=storage) for t, storage in read.items()}
            call = with_tensors(call, narrow)
        for t in call.outputs:  # overwritten: the copy is stale
            narrow_copy.pop(t.storage, None)
        builder.add(i, call)
    if not multiplied:
        raise ValueError(f"dtype {dtype!r}: the model has no linear layers in numbered blocks")
    return builder.step()


def _narrow_weights(capture: StepCapture) -> set[int]:
    """Storages of the matrices of numbered blocks and of stacked experts; routers stay in bf16.

    A router is a matrix with as many rows as there are experts.
    """
    experts = expert_weights(capture)
    expert_counts = {p.shape[0] for p in experts.values()}
    matrices = [p for p in capture.parameters if p.layer and len(p.shape) == 2]
    return {p.storage for p in matrices if p.shape[0] not in expert_counts} | experts.keys()


def _factors(call: OpCall) -> tuple[TensorSpec, ...]:
    """The two factors of a matrix product; () for other calls."""
    if call.op == GROUPED:
        return call.args[:2]
    return call.args[-2:] if call.op in LINEAR_PRODUCTS else ()


def _cast(t: TensorSpec, storage: int, user: OpCall, dtype: str) -> list[OpCall]:
    """The cast of the whole matrix behind ``t``, in the order in which it is stored.

    It reads 2 bytes per element and writes the narrow dtype twice, as the matrix is stored and
    transposed. It is priced as a copy in bf16 (2 + 2 bytes) of so many rows that as much is moved:
    (2 + 2 * narrow bytes) / 4 of them. A cast to nvfp4 looks for the largest number first.
    """
    whole = t if t.contiguous else replace(t, shape=t.shape[::-1], stride=())
    share = (1 + ELEMENT_BYTES[dtype]) / 2
    rows = max(1, round(share * whole.shape[0]))
    part = replace(whole, shape=(rows, *whole.shape[1:]))
    outputs = (replace(part, storage=storage),)
    cast = OpCall(op=CAST, args=(part,), outputs=outputs, phase=user.phase, module=user.module)
    if dtype != "nvfp4":
        return [cast]
    largest = (replace(whole, shape=(), storage=-1),)
    return [replace(cast, op=LARGEST, args=(whole, (), False), outputs=largest), cast]
