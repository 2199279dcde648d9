"""Expert parallelism: spreads experts over ep of the dp ranks and sends tokens there and back.

Added: an all_to_all before and after the experts, in forward and in backward. Each rank holds
1 / ep of the experts and computes the tokens that ep ranks route to them. ``ep=8:1.3`` states the
imbalance, tokens of the busiest rank over the mean: that rank computes and sends so many times the
tokens, and has memory for them; 1 is balanced routing, as captured. With ``ep_once`` a token goes
once to each node that has some of its experts (DeepEP, HybridEP), not to each of these. Memory:
1 / ep of the experts' parameters, gradients and optimizer state; buffers of what is sent and of
what arrives (``with_buffers``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.compose.graph.layers import is_expert
from itercast.compose.graph.product_roles import (
    DTYPE_CAST,
    EXPERT_PRODUCTS,
    LINEAR_PRODUCTS,
    alias_weight_casts,
    weight_copies,
)
from itercast.compose.graph.rewrite import (
    COLLECTIVE,
    StepBuilder,
    collective,
    fresh_storages,
    with_shape,
    with_tensors,
)

DISPATCH, COMBINE = "dispatch", "combine"  # messages of tokens to experts, and of their results


def expert_parallel(capture: StepCapture, plan: ParallelPlan) -> StepCapture:
    """Returns one rank's step; ValueError where ep does not divide the experts or none exist."""
    if plan.ep == 1:
        return capture
    weights = expert_weights(alias_weight_casts(capture))
    if not weights:
        raise ValueError(f"plan {str(plan)!r}: ep spreads experts, and the model has none")
    for p in weights.values():
        if p.shape[0] % plan.ep:
            raise ValueError(f"plan {str(plan)!r}: ep does not divide {p.shape[0]} experts")
    weights |= {s: weights[w] for s, w in weight_copies(capture).items() if w in weights}
    before, after = _first_and_last_products(capture, weights)
    experts = next(iter(weights.values())).shape[0]
    routed = _routed(capture, experts, min(before)) if plan.ep_once else (0, 0)
    made, inside, tokens = StepBuilder(capture), set[int](), 0
    for i, call in enumerate(capture.calls):
        if i in before:
            made.calls.append(_all_to_all(call.args[0], plan, call.phase, routed, DISPATCH))
            inside, tokens = set[int](), call.args[0].shape[-2]
        local = _local_call(call, plan, weights)
        if tokens and (local is not call or inside & {t.storage for t in call.tensors()}):
            inside |= {t.storage for t in call.outputs}
            local = _between(call, tokens, plan) if local is call else local
        made.add(i, local)
        if i in after:
            made.calls.append(_all_to_all(call.outputs[0], plan, call.phase, routed, COMBINE))
            tokens = 0
    return made.step(
        [_local_experts(p, plan) if p.storage in weights else p for p in capture.parameters]
    )


def with_buffers(capture: StepCapture) -> StepCapture:
    """Each message of tokens arrives in memory of its own, that of the busiest rank.

    What is sent is there until then, as in torch's all_to_all_single and Megatron-LM's _AllToAll.
    Experts read the tokens that arrived, which are saved for backward; all calls the results.
    """
    made, ids = StepBuilder(capture), fresh_storages(capture)
    tokens, results = dict[int, int](), dict[int, int]()  # storages: sent -> arrived
    for i, call in enumerate(capture.calls):
        experts = call.op in EXPERT_PRODUCTS or call.op == COLLECTIVE
        arrived = results | tokens if experts else results
        there = {t for t in call.touched if t.storage in arrived}
        call = with_tensors(call, {t: replace(t, storage=arrived[t.storage]) for t in there})
        if call.op == COLLECTIVE and call.module in (DISPATCH, COMBINE):
            sent, known = call.args[0], tokens if call.module == DISPATCH else results
            known[sent.storage] = next(ids)
            busiest = call.kwargs["scale"] if call.module == DISPATCH else 1.0
            whole = _more(sent, sent.shape[-2], busiest)
            call = replace(call, outputs=(replace(whole, storage=known[sent.storage]),))
        made.add(i, call)
    return made.step()


def expert_weights(capture: StepCapture) -> dict[int, ParamSpec]:
    """Returns the stacked weights that batched or grouped products multiply, by storage."""
    used = {c.args[1].storage for c in capture.calls if c.op in EXPERT_PRODUCTS}
    return {p.storage: p for p in capture.parameters if is_expert(p) and p.storage in used}


def _local_experts(p: ParamSpec, plan: ParallelPlan) -> ParamSpec:
    """1 / ep of a stack of expert weights."""
    return replace(p, shape=(p.shape[0] // plan.ep, *p.shape[1:]), spread=True)


def _local_call(call: OpCall, plan: ParallelPlan, weights: Mapping[int, ParamSpec]) -> OpCall:
    """A product with 1 / ep of the experts, each with ep * imbalance times the tokens.

    In C = A @ B tokens are the rows of A and C where B is a weight; in a weight's gradient they are
    the summed dimension: columns of A and rows of B.
    """
    shapes = {p.shape for p in weights.values()}
    gradient = call.phase == "backward" and call.outputs and call.outputs[0].shape in shapes
    if call.op == DTYPE_CAST and (call.args[0].storage in weights or gradient):
        return with_tensors(call, {t: _share(t, None, plan) for t in (call.args[0], *call.outputs)})
    if call.op not in EXPERT_PRODUCTS or len(call.outputs) != 1:
        return call
    dims: tuple[int | None, ...]  # dimension of tokens in A, B, C
    if call.args[1].storage in weights:
        dims = (-2, None, -2)
    elif gradient:
        dims = (-1, -2, None)
    else:
        return call
    tensors = (*call.args[:2], call.outputs[0])
    change = {t: _share(t, dim, plan) for t, dim in zip(tensors, dims, strict=True)}
    for ends in call.args[2:]:
        change[ends] = replace(ends, shape=(ends.shape[0] // plan.ep,))
    return with_tensors(call, change)


def _between(call: OpCall, tokens: int, plan: ParallelPlan) -> OpCall:
    """A call between experts' products over the tokens of the busiest rank."""
    if plan.imbalance == 1:
        return call
    return with_tensors(call, {t: _more(t, tokens, plan.imbalance) for t in call.touched})


def _more(t: TensorSpec, tokens: int, times: float) -> TensorSpec:
    """A tensor with a row for each token, of so many times the tokens."""
    if t.shape[-2:-1] != (tokens,):
        return t
    return with_shape(t, (*t.shape[:-2], round(times * tokens), t.shape[-1]))


def _share(t: TensorSpec, tokens: int | None, plan: ParallelPlan) -> TensorSpec:
    """A rank's share of a tensor whose dimension ``tokens`` counts tokens (None: it has none).

    (experts, ...): experts / ep, tokens * ep * imbalance. Without that first dimension a grouped
    product's rows are the tokens of all experts: tokens * imbalance.
    """
    shape, stacked = list(t.shape), len(t.shape) == 3
    if stacked:
        shape[0] //= plan.ep
    if tokens is not None:
        shape[tokens] = round(shape[tokens] * plan.imbalance * (plan.ep if stacked else 1))
    return with_shape(t, tuple(shape))


def _first_and_last_products(
    capture: StepCapture, weights: Mapping[int, ParamSpec]
) -> tuple[set[int], set[int]]:
    """Returns the calls that begin and end each layer's experts, in forward and in backward."""
    first: set[int] = set()
    last: set[int] = set()
    layer: tuple[str, str] | None = None
    previous = -1
    for i, call in enumerate(capture.calls):
        if call.op not in EXPERT_PRODUCTS or call.args[1].storage not in weights:
            continue
        key = (call.phase, weights[call.args[1].storage].layer)
        if key != layer:
            first.add(i)
            last.add(previous)
        layer, previous = key, i
    return first, (last | {previous}) - {-1}


def _routed(capture: StepCapture, experts: int, first: int) -> tuple[int, int]:
    """Experts, and how many of them a token goes to: rows of call ``first`` over the router's."""
    scores = [
        call.outputs[0].numel
        for call in capture.calls[:first]
        if call.op in LINEAR_PRODUCTS and call.outputs[0].shape[-1] == experts
    ]
    if not scores:
        raise ValueError(f"ep_once: no router before {experts} experts is seen")
    rows = capture.calls[first].args[0]
    tokens = scores[-1] // experts
    return experts, max(1, round(rows.numel / rows.shape[-1] / tokens))


def _all_to_all(
    t: TensorSpec, plan: ParallelPlan, phase: str, routed: tuple[int, int], name: str
) -> OpCall:
    sent = collective("all_to_all", "ep", t, phase, scale=plan.imbalance, routed=routed)
    return replace(sent, module=name)
