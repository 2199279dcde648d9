"""Expert parallelism: experts spread over ep ranks of dp, tokens sent to them and back.

Adds: an all_to_all before and after the experts, forward and backward. Each rank holds 1/ep of the
experts and sees the tokens of ep ranks. ``ep=8:1.3`` states the imbalance: the busiest rank's
tokens over the mean, which it computes and sends; 1 is balanced, as captured. Memory: expert
parameters, gradients and optimizer state by 1/ep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compose.plan import ParallelPlan
from compose.rewrite import Builder, changed, collective, with_shape
from microbench.opcall import OpCall, ParamSpec, StepCapture, TensorSpec
from microbench.shallow import layer_key

BATCHED = "aten.bmm.default"


def expert_parallel(capture: StepCapture, plan: ParallelPlan) -> StepCapture:
    """One rank's step; ValueError where ep does not divide the experts or there are none."""
    if plan.ep == 1:
        return capture
    weights = {p.storage: p for p in capture.parameters if is_expert(p)}
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
    return made.done([_part(p, plan) if is_expert(p) else p for p in capture.parameters])


def is_expert(p: ParamSpec) -> bool:
    """Weights of experts are stacked: (experts, in, out)."""
    return len(p.shape) == 3


def _part(p: ParamSpec, plan: ParallelPlan) -> ParamSpec:
    return replace(p, shape=(p.shape[0] // plan.ep, *p.shape[1:]))


def _local(call: OpCall, plan: ParallelPlan, weights: Mapping[int, ParamSpec]) -> OpCall:
    """1/ep of the experts, each with ep times (times the imbalance) the tokens.

    Of (A, B, C) tokens are rows of A and C where B is a weight; a weight's gradient sums over them.
    """
    shapes = {p.shape for p in weights.values()}
    if call.op != BATCHED or len(call.outputs) != 1:
        return call
    if call.args[1].storage in weights:
        dims = (1, 0, 1)
    elif call.phase == "backward" and call.outputs[0].shape in shapes:
        dims = (2, 1, 0)
    else:
        return call
    change: dict[TensorSpec, TensorSpec] = {}
    for t, dim in zip((*call.args[:2], call.outputs[0]), dims, strict=True):
        shape = [t.shape[0] // plan.ep, *t.shape[1:]]
        if dim:
            shape[dim] = round(shape[dim] * plan.ep * plan.imbalance)
        change[t] = with_shape(t, tuple(shape))
    return changed(call, change)


def _ends(capture: StepCapture, weights: Mapping[int, ParamSpec]) -> tuple[set[int], set[int]]:
    """First and last product with a layer's expert weights, in forward and in backward."""
    first: set[int] = set()
    last: set[int] = set()
    before: tuple[str, str] | None = None
    previous = -1
    for i, call in enumerate(capture.calls):
        if call.op != BATCHED or call.args[1].storage not in weights:
            continue
        key = (call.phase, layer_key(weights[call.args[1].storage].name))
        if key != before:
            first.add(i)
            last.add(previous)
        before, previous = key, i
    return first, (last | {previous}) - {-1}


def _exchange(made: Builder, t: TensorSpec, plan: ParallelPlan, phase: str) -> None:
    made.calls.append(collective("all_to_all", "ep", t, phase, scale=plan.imbalance))
