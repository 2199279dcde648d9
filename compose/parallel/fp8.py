"""Runs the linear layers and experts of a captured step in fp8, as Transformer Engine does."""

from __future__ import annotations

from dataclasses import replace

from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.graph.product_roles import LINEAR_PRODUCTS, alias_weight_casts
from itercast.compose.graph.rewrite import StepBuilder, fresh_storages, with_tensors
from itercast.compose.parallel.ep import expert_weights
from itercast.microbench.opcall import OpCall, StepCapture, TensorSpec, layer_key
from itercast.microbench.ops.matrix.gemm import GROUPED

# The op that stands for a cast: it reads 2 bytes per element and writes fp8 twice, as the matrix is
# stored and transposed; a copy in bf16 moves as many bytes.
FP8_CAST = "aten.clone.default"


@cached_by_identity
def with_fp8(capture: StepCapture) -> StepCapture:
    """The step with the products of its blocks' linear layers in fp8; ValueError where none are.

    Blocks are modules with a number in their name (``layers.3``): embeddings and heads stay in
    bf16, as in Megatron-LM. Each activation and gradient that such a product reads is cast once.
    Not counted: casts of weights (once per step), casts fused into the norm before a linear layer.
    """
    capture = alias_weight_casts(capture)
    weights = _fp8_weights(capture)
    shapes = {p.shape for p in capture.parameters if p.storage in weights}
    multiplied: set[int] = set()  # activations that one of these weights multiplied
    fp8_copy: dict[int, int] = {}  # storage -> storage of its copy in fp8
    made, fresh = StepBuilder(capture), fresh_storages(capture)
    for i, call in enumerate(capture.calls):
        factors = _factors(call)
        by_weight = bool(factors) and factors[1].storage in weights
        is_input = any(t.storage in multiplied for t in factors)
        weight_gradient = is_input and call.outputs[0].shape in shapes
        if by_weight or weight_gradient:
            for t in factors:
                if t.storage not in weights | fp8_copy.keys():
                    fp8_copy[t.storage] = next(fresh)
                    made.calls.append(_cast(t, fp8_copy[t.storage], call))
            if by_weight and call.phase != "backward":
                multiplied.add(factors[0].storage)
            call = with_tensors(call, {t: _in_fp8(t, fp8_copy) for t in factors})
        for t in call.outputs:  # overwritten: the copy is stale
            fp8_copy.pop(t.storage, None)
        made.add(i, call)
    if not multiplied:
        raise ValueError("dtype 'fp8': the model has no linear layers in numbered blocks")
    return made.step(capture.parameters)


def _fp8_weights(capture: StepCapture) -> set[int]:
    """Storages of the matrices of numbered blocks and of stacked experts; routers stay in bf16.

    A router is a matrix with as many rows as there are experts.
    """
    experts = expert_weights(capture)
    expert_counts = {p.shape[0] for p in experts.values()}
    matrices = [p for p in capture.parameters if layer_key(p.name) and len(p.shape) == 2]
    return {p.storage for p in matrices if p.shape[0] not in expert_counts} | experts.keys()


def _factors(call: OpCall) -> tuple[TensorSpec, ...]:
    """The two factors of a matrix product; () for other calls."""
    if call.op == GROUPED:
        return call.args[:2]
    return call.args[-2:] if call.op in LINEAR_PRODUCTS else ()


def _cast(t: TensorSpec, storage: int, user: OpCall) -> OpCall:
    """The cast to fp8 of the whole matrix behind ``t``, in the order in which it is stored."""
    whole = t if t.contiguous else replace(t, shape=t.shape[::-1], stride=())
    outputs = (replace(whole, storage=storage),)
    return OpCall(op=FP8_CAST, args=(whole,), outputs=outputs, phase=user.phase, module=user.module)


def _in_fp8(t: TensorSpec, fp8_copy: dict[int, int]) -> TensorSpec:
    return replace(t, dtype="fp8", storage=fp8_copy.get(t.storage, t.storage))
