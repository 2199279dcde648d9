"""Context parallelism by ring attention (arXiv:2310.01889), in zigzag order where causal.

The step is captured at a rank's share of the sequence, 1 / cp of the tokens. Added to each call of
attention: cp - 1 calls to the keys and values of other ranks, each received while the one before
computes; in backward the gradients of keys and values travel along, and once more, home. In zigzag
order a causal mask leaves half of each of these blocks. Memory: the keys and values in flight.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from itercast.capture.opcall import Argument, OpCall, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.graph.rewrite import StepBuilder, collective
from itercast.microbench.ops.step.alpha_beta import EXCHANGE

ATTENTION = ("itercast.sdpa", "itercast.sdpa_backward")


def context_parallel(capture: StepCapture, plan: ParallelPlan) -> StepCapture:
    """Returns one rank's step; ValueError where the step has no attention."""
    if plan.cp == 1:
        return capture
    if not any(call.op in ATTENTION for call in capture.calls):
        raise ValueError(f"plan {str(plan)!r}: cp splits attention, and the model has none")
    return _with_ring(capture, plan.cp)


@cached_by_identity
def _with_ring(capture: StepCapture, cp: int) -> StepCapture:
    """The step with the ring of ``cp`` ranks around each attention call, as described above."""
    builder = StepBuilder(capture)
    for i, call in enumerate(capture.calls):
        if call.op not in ATTENTION:
            builder.add(i, call)
            continue
        remote_attention = _remote_block(call)
        keys, values = call.args[-2], call.args[-1]
        keys_and_values = 1 + values.numel / keys.numel  # bytes over those of the keys
        is_backward = call.op != "itercast.sdpa"
        send = partial(collective, EXCHANGE, "cp", keys, call.phase)
        with_gradients = 2 * keys_and_values if is_backward else keys_and_values
        for _ in range(cp - 1):
            builder.calls.append(send(overlaps_next=True, scale=with_gradients))
            builder.calls.append(remote_attention)
        builder.add(i, call)
        if is_backward:  # the sums of gradients return to the rank of their keys
            builder.calls.append(send(scale=keys_and_values))
    return builder.step()


def _remote_block(call: OpCall) -> OpCall:
    """Attention to another rank's keys and values: unmasked, half of them where causal."""
    if not call.kwargs.get("is_causal"):
        return call
    args: list[Argument] = [*call.args[:-2]]
    for t in call.args[-2:]:  # keys and values: (batch, heads, length, head_dim)
        args.append(replace(t, shape=(*t.shape[:2], max(1, t.shape[2] // 2), t.shape[3])))
    has_gradients = len(call.outputs) > 1  # of query, key and value
    outputs = (call.outputs[0], *args[-2:]) if has_gradients else call.outputs
    return replace(
        call, args=tuple(args), kwargs={**call.kwargs, "is_causal": False}, outputs=outputs
    )
