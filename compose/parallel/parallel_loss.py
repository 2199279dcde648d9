"""Cross entropy over logits that are cut by vocabulary: torch's loss_parallel, Megatron-LM.

Added: all_reduces of the maximum, of the sum of exponentials and of the label's logit, one number
per token each. A fused softmax passes over the logits once; here each of its steps is one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from itercast.capture.opcall import OpCall, TensorSpec
from itercast.compose.graph.cross_entropy import LABELS, SOFTMAX, SOFTMAX_BACKWARD, per_token
from itercast.compose.graph.rewrite import collective, with_tensors

LOSS = (SOFTMAX, LABELS, SOFTMAX_BACKWARD)


def parallel_loss(
    call: OpCall, shards: Mapping[TensorSpec, TensorSpec], fresh: Iterator[int]
) -> list[OpCall]:
    """Returns what a rank runs instead of one call of ``LOSS``.

    ``shards`` maps the call's tensors to the rank's shards; ``fresh`` yields unused storage ids.
    """
    local = with_tensors(call, shards)
    if call.op == LABELS:
        logits = local.tensors()[0]
        return [_all_reduce(per_token(logits, fresh), call.phase), local]
    if call.op == SOFTMAX_BACKWARD:
        return _softmax_backward(local, fresh)
    return _softmax(local, fresh)


def _softmax(local: OpCall, fresh: Iterator[int]) -> list[OpCall]:
    """y = (x - max(x)) - log(sum(exp(x - max(x)))), with max and sum over all ranks."""
    x, phase = local.tensors()[0], local.phase
    maximum, total, log = (per_token(x, fresh) for _ in range(3))
    shifted, exponentials = (replace(x, storage=next(fresh)) for _ in range(2))
    largest = _op("amax.default", x, out=maximum, phase=phase)
    summed = _op("sum.dim_IntList", exponentials, out=total, phase=phase)
    return [
        replace(largest, args=(x, (-1,), True)),
        _all_reduce(maximum, phase),
        _op("sub.Tensor", x, maximum, out=shifted, phase=phase),
        _op("exp.default", shifted, out=exponentials, phase=phase),
        replace(summed, args=(exponentials, (-1,), True)),
        _all_reduce(total, phase),
        _op("log.default", total, out=log, phase=phase),
        _op("sub.Tensor", shifted, log, out=local.outputs[0], phase=phase),
    ]


def _softmax_backward(local: OpCall, fresh: Iterator[int]) -> list[OpCall]:
    """Returns the calls of dx = dy - exp(y) * sum(dy): three passes over a rank's logits.

    Their order is not that of the formula, but they move the same bytes.
    """
    (dy, y), phase = local.tensors()[:2], local.phase
    exponentials, combined = (replace(dy, storage=next(fresh)) for _ in range(2))
    return [
        _op("exp.default", y, out=exponentials, phase=phase),
        _op("add.Tensor", dy, exponentials, out=combined, phase=phase),
        _op("mul.Tensor", combined, per_token(dy, fresh), out=local.outputs[0], phase=phase),
    ]


def _op(name: str, *args: TensorSpec, out: TensorSpec, phase: str) -> OpCall:
    return OpCall(op=f"aten.{name}", args=args, outputs=(out,), phase=phase)


def _all_reduce(t: TensorSpec, phase: str) -> OpCall:
    return collective("all_reduce", "tp", t, phase)
