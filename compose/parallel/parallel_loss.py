"""Cross entropy over logits cut by vocabulary, as torch's loss_parallel and Megatron-LM write it.

Adds: the maximum, the sum of exponentials and the label's logit are reduced over the ranks; the
logits are passed over once for each of the steps that a fused softmax does in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from compose.graph.rewrite import changed, collective
from microbench.opcall import OpCall, TensorSpec

SOFTMAX = "aten._log_softmax.default"
LABELS = "aten.nll_loss_forward.default"
SOFTMAX_BACKWARD = "aten._log_softmax_backward_data.default"
LOSS = (SOFTMAX, LABELS, SOFTMAX_BACKWARD)


def parallel_loss(
    call: OpCall, cut: Mapping[TensorSpec, TensorSpec], fresh: Iterator[int]
) -> list[OpCall]:
    """What stands for one of ``LOSS`` on a rank: ``cut`` are its tensors' parts.

    ``fresh``: names of storages nobody has.
    """
    local = changed(call, cut)
    (part, *_), phase = local.tensors(), call.phase
    each = replace(part, shape=(*part.shape[:-1], 1), stride=())

    def new(like: TensorSpec) -> TensorSpec:
        return replace(like, storage=next(fresh))

    def op(name: str, *args: TensorSpec, out: TensorSpec) -> OpCall:
        return OpCall(op=f"aten.{name}", args=args, outputs=(out,), phase=phase)

    def reduced(t: TensorSpec) -> OpCall:
        return collective("all_reduce", "tp", t, phase)

    if call.op == LABELS:
        return [reduced(new(each)), local]
    if call.op == SOFTMAX_BACKWARD:
        (gradient, logs), out = local.tensors()[:2], local.outputs[0]
        grown, total = new(part), new(part)
        return [
            op("exp.default", logs, out=grown),
            op("add.Tensor", gradient, grown, out=total),
            op("mul.Tensor", total, new(each), out=out),
        ]
    most, shifted, grown, total, log = new(each), new(part), new(part), new(each), new(each)
    return [
        replace(op("amax.default", part, out=most), args=(part, (-1,), True)),
        reduced(most),
        op("sub.Tensor", part, most, out=shifted),
        op("exp.default", shifted, out=grown),
        replace(op("sum.dim_IntList", grown, out=total), args=(grown, (-1,), True)),
        reduced(total),
        op("log.default", total, out=log),
        op("sub.Tensor", shifted, log, out=local.outputs[0]),
    ]
