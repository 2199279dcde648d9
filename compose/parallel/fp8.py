"""Linear layers and experts in fp8, as Transformer Engine runs them: all else stays as it was."""

from __future__ import annotations

from dataclasses import replace

from compose.graph.identity_cache import remembered
from compose.graph.product_roles import PRODUCTS, casts_as_weights
from compose.graph.rewrite import Builder, changed, fresh_storages
from compose.parallel.ep import expert_weights
from microbench.capture.truncate import layer_key
from microbench.opcall import OpCall, StepCapture, TensorSpec
from microbench.ops.matrix.gemm import GROUPED

CAST = "aten.clone.default"


@remembered
def with_fp8(capture: StepCapture) -> StepCapture:
    """The step with the products of its blocks' linear layers in fp8; ValueError where none are.

    Blocks are modules with a number (``layers.3``): embeddings and heads stay as they are, as in
    Megatron-LM. What a weight or its gradient meets is cast once, by a kernel that reads two bytes
    of an element and writes it in fp8 twice, as it lies and transposed: as long as a copy takes.
    Weights are cast once a step, which is not counted; nor is what a norm saves that casts itself.
    """
    capture = casts_as_weights(capture)
    weights = _weights(capture)
    shapes = {p.shape for p in capture.parameters if p.storage in weights}
    met: set[int] = set()  # activations that one of these weights multiplied
    narrow: dict[int, int] = {}  # what is in memory in fp8 too, by what it was made of
    made, fresh = Builder(capture), fresh_storages(capture)
    for i, call in enumerate(capture.calls):
        factors = _factors(call)
        of_weight = bool(factors) and factors[1].storage in weights
        gradient = any(t.storage in met for t in factors) and call.outputs[0].shape in shapes
        if of_weight or gradient:
            for t in factors:
                if t.storage not in weights | narrow.keys():
                    narrow[t.storage] = next(fresh)
                    made.calls.append(_cast(t, narrow[t.storage], call))
            if of_weight and call.phase != "backward":
                met.add(factors[0].storage)
            call = changed(call, {t: _in_fp8(t, narrow) for t in factors})
        for t in call.outputs:  # written anew
            narrow.pop(t.storage, None)
        made.keep(i, call)
    if not met:
        raise ValueError("dtype 'fp8': the model has no linear layers in numbered blocks")
    return made.done(capture.parameters)


def _weights(capture: StepCapture) -> set[int]:
    """Of linear layers and of experts, not of routers, which have a row by expert."""
    experts = expert_weights(capture)
    routed = {p.shape[0] for p in experts.values()}
    own = [p for p in capture.parameters if layer_key(p.name) and len(p.shape) == 2]
    return {p.storage for p in own if p.shape[0] not in routed} | experts.keys()


def _factors(call: OpCall) -> tuple[TensorSpec, ...]:
    """Of a product; () of other calls."""
    if call.op == GROUPED:
        return call.args[:2]
    return call.args[-2:] if call.op in PRODUCTS else ()


def _cast(t: TensorSpec, storage: int, user: OpCall) -> OpCall:
    """Of the whole matrix, as it lies in memory."""
    whole = t if t.contiguous else replace(t, shape=t.shape[::-1], stride=())
    outputs = (replace(whole, storage=storage),)
    return OpCall(op=CAST, args=(whole,), outputs=outputs, phase=user.phase, module=user.module)


def _in_fp8(t: TensorSpec, narrow: dict[int, int]) -> TensorSpec:
    return replace(t, dtype="fp8", storage=narrow.get(t.storage, t.storage))
