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
    copies = {copy: weights[w] for copy, w in weight_copies(capture).items() if w in weights}
    weights |= copies
    first_products, last_products = _first_and_last_products(capture, weights)
    experts = next(iter(weights.values())).shape[0]
    routed = _routed(capture, experts, min(first_products)) if plan.ep_once else (0, 0)
    builder = StepBuilder(capture)
    tokens = 0  # rows that the layer's experts read; 0 outside of experts
    of_experts = set[int]()  # storages that the layer's experts have made
    for i, call in enumerate(capture.calls):
        if i in first_products:
            builder.calls.append(_all_to_all(call.args[0], plan, call.phase, routed, DISPATCH))
            of_experts, tokens = set[int](), call.args[0].shape[-2]
        local = _local_call(call, plan, weights)
        is_product = local is not call
        if tokens and (is_product or of_experts & {t.storage for t in call.tensors()}):
            of_experts |= {t.storage for t in call.outputs}
            local = local if is_product else _on_busiest_rank(call, tokens, plan)
        builder.add(i, local)
        if i in last_products:
            builder.calls.append(_all_to_all(call.outputs[0], plan, call.phase, routed, COMBINE))
            tokens = 0
    parameters = [
        replace(p, shape=(p.shape[0] // plan.ep, *p.shape[1:]), spread=True)
        if p.storage in weights
        else p
        for p in capture.parameters
    ]
    return builder.step(parameters)


def with_buffers(capture: StepCapture) -> StepCapture:
    """The step whose all_to_alls write into memory of their own, as much as the busiest rank's.

    What is sent stays until then, as in torch's all_to_all_single and Megatron-LM's _AllToAll.
    Experts read the tokens that arrived, which are saved for backward; all other calls read the
    results that came back.
    """
    builder, fresh = StepBuilder(capture), fresh_storages(capture)
    tokens, results = dict[int, int](), dict[int, int]()  # storages: sent -> arrived
    for i, call in enumerate(capture.calls):
        reads_tokens = call.op in EXPERT_PRODUCTS or call.op == COLLECTIVE
        arrived = results | tokens if reads_tokens else results
        moved = {t for t in call.touched if t.storage in arrived}
        call = with_tensors(call, {t: replace(t, storage=arrived[t.storage]) for t in moved})
        if call.op == COLLECTIVE and call.module in (DISPATCH, COMBINE):
            dispatches, sent = call.module == DISPATCH, call.args[0]
            storage = next(fresh)
            (tokens if dispatches else results)[sent.storage] = storage
            imbalance = call.kwargs["scale"] if dispatches else 1.0
            received = _with_more_rows(sent, sent.shape[-2], imbalance)
            call = replace(call, outputs=(replace(received, storage=storage),))
        builder.add(i, call)
    return builder.step()


def expert_weights(capture: StepCapture) -> dict[int, ParamSpec]:
    """Stacked expert weights that batched or grouped products multiply, by storage."""
    used = {c.args[1].storage for c in capture.calls if c.op in EXPERT_PRODUCTS}
    return {p.storage: p for p in capture.parameters if is_expert(p) and p.storage in used}


def _local_call(call: OpCall, plan: ParallelPlan, weights: Mapping[int, ParamSpec]) -> OpCall:
    """A product or cast with 1 / ep of the experts, each with ep * imbalance times the tokens.

    In C = A @ B tokens are the rows of A and C where B is a weight; in a weight's gradient they are
    the summed dimension: columns of A and rows of B. Any other call is returned as it is.
    """
    shapes = {p.shape for p in weights.values()}
    is_gradient = call.phase == "backward" and call.outputs and call.outputs[0].shape in shapes
    if call.op == DTYPE_CAST and (call.args[0].storage in weights or is_gradient):
        cast = (call.args[0], *call.outputs)
        return with_tensors(call, {t: _rank_share(t, None, plan) for t in cast})
    if call.op not in EXPERT_PRODUCTS or len(call.outputs) != 1:
        return call
    token_dims: tuple[int | None, ...]  # in A, B, C
    if call.args[1].storage in weights:
        token_dims = (-2, None, -2)
    elif is_gradient:
        token_dims = (-1, -2, None)
    else:
        return call
    tensors = (*call.args[:2], call.outputs[0])
    change = {t: _rank_share(t, dim, plan) for t, dim in zip(tensors, token_dims, strict=True)}
    for ends in call.args[2:]:  # where each expert's rows end in a grouped product
        change[ends] = replace(ends, shape=(ends.shape[0] // plan.ep,))
    return with_tensors(call, change)


def _on_busiest_rank(call: OpCall, tokens: int, plan: ParallelPlan) -> OpCall:
    """A call between experts' products, on tensors with imbalance times as many token rows."""
    if plan.imbalance == 1:
        return call
    return with_tensors(call, {t: _with_more_rows(t, tokens, plan.imbalance) for t in call.touched})


def _with_more_rows(t: TensorSpec, rows: int, factor: float) -> TensorSpec:
    """The tensor with factor * ``rows`` rows, if its last dimension but one is ``rows`` long."""
    if t.shape[-2:-1] != (rows,):
        return t
    return with_shape(t, (*t.shape[:-2], round(factor * rows), t.shape[-1]))


def _rank_share(t: TensorSpec, token_dim: int | None, plan: ParallelPlan) -> TensorSpec:
    """A rank's share of a tensor whose dimension ``token_dim`` counts tokens (None: it has none).

    (experts, ...): experts / ep, tokens * ep * imbalance. Without that first dimension a grouped
    product's rows are the tokens of all experts: tokens * imbalance.
    """
    shape, stacked = list(t.shape), len(t.shape) == 3
    if stacked:
        shape[0] //= plan.ep
    if token_dim is not None:
        more_tokens = plan.imbalance * (plan.ep if stacked else 1)
        shape[token_dim] = round(shape[token_dim] * more_tokens)
    return with_shape(t, tuple(shape))


def _first_and_last_products(
    capture: StepCapture, weights: Mapping[int, ParamSpec]
) -> tuple[set[int], set[int]]:
    """Indices of the products that begin, and that end, each layer's experts, in each pass."""
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
    """(number of experts, how many of them each token goes to).

    The latter is rows of the experts' input over tokens of the router's scores. ``first``: index of
    the first expert product; a router is a linear layer before it with as many outputs as experts.
    """
    scores = [
        call.outputs[0].numel
        for call in capture.calls[:first]
        if call.op in LINEAR_PRODUCTS and call.outputs[0].shape[-1] == experts
    ]
    if not scores:
        raise ValueError(f"ep_once: no router before {experts} experts is seen")
    expert_input = capture.calls[first].args[0]
    tokens, rows = scores[-1] // experts, expert_input.numel / expert_input.shape[-1]
    return experts, max(1, round(rows / tokens))


def _all_to_all(
    t: TensorSpec, plan: ParallelPlan, phase: str, routed: tuple[int, int], purpose: str
) -> OpCall:
    """The message of rows of ``t``; ``routed``: see ``_routed``; purpose: DISPATCH or COMBINE."""
    sent = collective("all_to_all", "ep", t, phase, scale=plan.imbalance, routed=routed)
    return replace(sent, module=purpose)
