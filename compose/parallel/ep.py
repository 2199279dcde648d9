"""Expert parallelism: experts spread over ep ranks of dp, tokens sent to them and back.

Adds: an all_to_all before and after the experts, forward and backward. Each rank holds 1/ep of the
experts and sees the tokens of ep ranks. ``ep=8:1.3`` states the imbalance: the busiest rank's
tokens over the mean, which it computes and sends; 1 is balanced, as captured. Memory: expert
parameters, gradients and optimizer state by 1/ep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compose.graph.product_roles import CAST, casts_as_weights
from compose.graph.rewrite import Builder, changed, collective, with_shape
from compose.parallel.plan import ParallelPlan
from microbench.capture.truncate import layer_key
from microbench.opcall import OpCall, ParamSpec, StepCapture, TensorSpec
from microbench.ops.matrix.gemm import GROUPED

PRODUCTS = ("aten.bmm.default", GROUPED)


def expert_parallel(capture: StepCapture, plan: ParallelPlan) -> StepCapture:
    """One rank's step; ValueError where ep does not divide the experts or there are none."""
    if plan.ep == 1:
        return capture
    capture = casts_as_weights(capture)
    weights = expert_weights(capture)
    if not weights:
        raise ValueError(f"plan {str(plan)!r}: ep spreads experts, the model has none")
    for p in weights.values():
        if p.shape[0] % plan.ep:
            raise ValueError(f"plan {str(plan)!r}: ep does not divide {p.shape[0]} experts")
    before, after = _ends(capture, weights)
    made = Builder(capture)
    for i, call in enumerate(capture.calls):
        if i in before:
            _exchange(made, call.args[0], plan, call.phase)
        made.keep(i, _local(call, plan, weights))
        if i in after:
            _exchange(made, call.outputs[0], plan, call.phase)
    return made.done([_part(p, plan) if p.storage in weights else p for p in capture.parameters])


def expert_weights(capture: StepCapture) -> dict[int, ParamSpec]:
    """Stacked weights that products by expert take, by storage."""
    met = {c.args[1].storage for c in capture.calls if c.op in PRODUCTS}
    return {p.storage: p for p in capture.parameters if is_expert(p) and p.storage in met}


def is_expert(p: ParamSpec) -> bool:
    """Weights of experts are stacked: (experts, in, out)."""
    return len(p.shape) == 3


def _part(p: ParamSpec, plan: ParallelPlan) -> ParamSpec:
    return replace(p, shape=(p.shape[0] // plan.ep, *p.shape[1:]))


def _local(call: OpCall, plan: ParallelPlan, weights: Mapping[int, ParamSpec]) -> OpCall:
    """1/ep of the experts, each with ep times (times the imbalance) the tokens.

    Of (A, B, C) tokens are rows of A and C where B is a weight; a weight's gradient sums over them.
    """
    if call.op == CAST and call.args[0].storage in weights:
        return changed(call, {t: _share(t, None, plan) for t in (call.args[0], *call.outputs)})
    if call.op not in PRODUCTS or len(call.outputs) != 1:
        return call
    dims: tuple[int | None, ...]
    if call.args[1].storage in weights:
        dims = (-2, None, -2)
    elif call.phase == "backward" and call.outputs[0].shape in {p.shape for p in weights.values()}:
        dims = (-1, -2, None)
    else:
        return call
    tensors = (*call.args[:2], call.outputs[0])
    change = {t: _share(t, dim, plan) for t, dim in zip(tensors, dims, strict=True)}
    for ends in call.args[2:]:
        change[ends] = replace(ends, shape=(ends.shape[0] // plan.ep,))
    return changed(call, change)


def _share(t: TensorSpec, tokens: int | None, plan: ParallelPlan) -> TensorSpec:
    """A rank's part of a stack by expert, or of a row of all experts' tokens, as many as before."""
    shape, stacked = list(t.shape), len(t.shape) == 3
    if stacked:
        shape[0] //= plan.ep
    if tokens is not None:
        shape[tokens] = round(shape[tokens] * plan.imbalance * (plan.ep if stacked else 1))
    return with_shape(t, tuple(shape))


def _ends(capture: StepCapture, weights: Mapping[int, ParamSpec]) -> tuple[set[int], set[int]]:
    """First and last product with a layer's expert weights, in forward and in backward."""
    first: set[int] = set()
    last: set[int] = set()
    before: tuple[str, str] | None = None
    previous = -1
    for i, call in enumerate(capture.calls):
        if call.op not in PRODUCTS or call.args[1].storage not in weights:
            continue
        key = (call.phase, layer_key(weights[call.args[1].storage].name))
        if key != before:
            first.add(i)
            last.add(previous)
        before, previous = key, i
    return first, (last | {previous}) - {-1}


def _exchange(made: Builder, t: TensorSpec, plan: ParallelPlan, phase: str) -> None:
    made.calls.append(collective("all_to_all", "ep", t, phase, scale=plan.imbalance))
