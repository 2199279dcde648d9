"""Context parallelism by ring attention (arXiv:2310.01889), in zigzag order where causal.

The step is captured at a rank's share of the sequence. Adds: in each attention cp - 1 more blocks
of scores, with the keys and values of the next rank received behind the block before; in backward
their gradients travel too. Causal masks leave half of each foreign block. Memory: the keys and
values in flight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compose.graph.rewrite import Builder, collective, with_shape
from compose.parallel.plan import ParallelPlan
from microbench.opcall import OpCall, StepCapture, TensorSpec


def context_parallel(capture: StepCapture, plan: ParallelPlan) -> StepCapture:
    """One rank's step; ValueError where there is no attention to share."""
    if plan.cp == 1:
        return capture
    made = Builder(capture)
    found = False
    for i, call in enumerate(capture.calls):
        if call.op not in ("itercast.sdpa", "itercast.sdpa_backward"):
            made.keep(i, call)
            continue
        found = True
        foreign = _foreign(call)
        keys, values = call.args[-2], call.args[-1]
        travels = 1 if call.op == "itercast.sdpa" else 2  # backward: gradients as well
        sent = _together(keys, values)
        for _ in range(plan.cp - 1):
            made.calls.append(
                collective("send_recv", "cp", sent, call.phase, behind=True, scale=travels)
            )
            made.calls.append(foreign)
        made.keep(i, call)
    if not found:
        raise ValueError(f"plan {str(plan)!r}: cp shares attention, the step has none")
    return made.done(capture.parameters)


def _foreign(call: OpCall) -> OpCall:
    """Attention to another rank's keys: no mask, half of them where the whole is causal."""
    if not call.kwargs.get("is_causal"):
        return call
    half = {id(t): _halved(t) for t in call.args[-2:]}
    args: list[Any] = [half.get(id(t), t) for t in call.args]
    outputs = call.outputs if len(call.outputs) == 1 else (call.outputs[0], *args[-2:])
    return replace(
        call, args=tuple(args), kwargs={**call.kwargs, "is_causal": False}, outputs=outputs
    )


def _halved(t: TensorSpec) -> TensorSpec:
    """Half of the keys or values: (batch, heads, length, head_dim)."""
    return with_shape(t, (*t.shape[:2], max(1, t.shape[2] // 2), t.shape[3]))


def _together(keys: TensorSpec, values: TensorSpec) -> TensorSpec:
    return TensorSpec(shape=(keys.numel + values.numel,), dtype=keys.dtype)
