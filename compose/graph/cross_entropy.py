"""Cross entropy as Megatron-LM computes it: in fp32, by calls that each pass over all logits.

- Forward: the maximum, x - maximum, exp, sum, exp / sum. The label's logit and the logarithm are
  one number per token.
- Backward: the softmax times the gradient of each token's loss.
- Each result overwrites what it is made of.

Source: megatron/core/tensor_parallel/cross_entropy.py in https://github.com/NVIDIA/Megatron-LM.
These calls stay apart unless the option cross_entropy_loss_fusion is set, which it is not by
default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.rewrite import StepBuilder, fresh_storages, with_tensors

SOFTMAX = "aten._log_softmax.default"
LABELS = "aten.nll_loss_forward.default"
LABELS_BACKWARD = "aten.nll_loss_backward.default"
SOFTMAX_BACKWARD = "aten._log_softmax_backward_data.default"
CAST = "aten._to_copy.default"
SHIFTED, EXPONENTIALS, QUOTIENT = "aten.sub.Tensor", "aten.exp.default", "aten.div.Tensor"
IN_PLACE = (SHIFTED, EXPONENTIALS, QUOTIENT, "aten.mul.Tensor")
PRECISE, HALF = "fp32", ("bf16", "fp16")


def over_logits(capture: StepCapture) -> Callable[[OpCall], bool]:
    """Returns a test: whether a call reads or writes a tensor as large as the step's logits."""
    logits = _logits(capture)
    return lambda call: any(_size(t) in logits for t in call.touched)


def stepwise_cross_entropy(capture: StepCapture) -> StepCapture:
    """Returns the step with Megatron-LM's calls in place of torch's log-softmax and its backward.

    Under tensor parallelism torch's forward calls stand there already
    (``itercast.compose.parallel.parallel_loss``); the last one becomes Megatron-LM's.
    """
    builder, fresh, logits = StepBuilder(capture), fresh_storages(capture), _logits(capture)
    skipped = 0  # calls still to come of a backward pass that one product stands for
    exponentials: TensorSpec | None = None
    for i, call in enumerate(capture.calls):
        if skipped:
            skipped -= 1
            continue
        if call.op == SOFTMAX and _size(call.args[0]) in logits:
            calls = list(_forward(call, fresh))
        elif call.op == LABELS_BACKWARD:
            run = _gradient_calls(capture.calls[i:], logits)
            calls, skipped = list(_backward(run, fresh)), len(run) - 1
        elif call.op == SHIFTED and exponentials and _size(call.outputs[0]) in logits:
            calls = [replace(call, op=QUOTIENT, args=(exponentials, call.args[1]))]
        else:
            calls = [call]
        if call.op == EXPONENTIALS and _size(call.outputs[0]) in logits:
            exponentials = call.outputs[0]
        builder.calls += calls[:-1]
        builder.add(i, calls[-1])
    return _in_place(builder.step(), logits)


def loss_in_fp32(capture: StepCapture) -> StepCapture:
    """Returns the step whose logits are cast to fp32 before the loss, and their gradient back."""
    builder, fresh, logits = StepBuilder(capture), fresh_storages(capture), _logits(capture)
    precise = set[int]()  # storages of logarithms of probabilities and of their gradients
    for i, call in enumerate(capture.calls):
        wide = dict[TensorSpec, TensorSpec]()
        first = call.op in (SOFTMAX, LABELS_BACKWARD)
        if first or not precise.isdisjoint(t.storage for t in call.tensors()):
            half = (t for t in call.touched if t.dtype in HALF and _size(t) in logits)
            wide = {t: replace(t, dtype=PRECISE) for t in half}
        precise.update(t.storage for t in call.outputs if t in wide)
        if call.op == SOFTMAX and wide:
            x = call.args[0]
            wide[x] = replace(wide[x], storage=next(fresh))
            builder.calls.append(OpCall(op=CAST, args=(x,), outputs=(wide[x],), phase=call.phase))
        elif call.op == SOFTMAX_BACKWARD and wide:
            dx = call.outputs[0]
            precise.discard(dx.storage)
            wide[dx] = replace(wide[dx], storage=next(fresh))
            builder.calls.append(with_tensors(call, wide))
            call = OpCall(op=CAST, args=(wide[dx],), outputs=(dx,), phase=call.phase)
            wide = {}
        builder.add(i, with_tensors(call, wide))
    return builder.step()


def _in_place(capture: StepCapture, logits: set[tuple[int, int]]) -> StepCapture:
    """The step whose passes over logits write over an input that no later call reads."""
    last = {t.storage: i for i, c in enumerate(capture.calls) for t in c.tensors()}
    into: dict[int, int] = {}  # storage of a result -> that of what it overwrites
    calls = []
    for i, call in enumerate(capture.calls):
        if call.op in IN_PLACE and _size(out := call.outputs[0]) in logits:
            for t in call.tensors():
                if (_size(t), t.dtype) == (_size(out), out.dtype) and last[t.storage] == i:
                    into[out.storage] = into.get(t.storage, t.storage)
        tensors = (t for t in call.touched if t.storage in into)
        calls.append(with_tensors(call, {t: replace(t, storage=into[t.storage]) for t in tensors}))
    return replace(capture, calls=tuple(calls))


def _logits(capture: StepCapture) -> set[tuple[int, int]]:
    """``_size`` of the log-probabilities from which the loss picks those of the labels."""
    return {_size(c.args[0]) for c in capture.calls if c.op == LABELS}


def _size(t: TensorSpec) -> tuple[int, int]:
    """(number of elements, length of the last dimension), by which logits are recognised."""
    return t.numel, t.shape[-1] if t.shape else 1


def _gradient_calls(calls: Sequence[OpCall], logits: set[tuple[int, int]]) -> list[OpCall]:
    """The calls that turn gradients of label logits into gradients of all logits, without casts.

    ``logits``: see ``_logits``.
    """
    run = [calls[0]]
    for call in calls[1:]:
        if call.op == CAST or not any(_size(t) in logits for t in call.outputs):
            break
        run.append(call)
    return run


def _forward(call: OpCall, fresh: Iterator[int]) -> Iterator[OpCall]:
    """Megatron-LM's calls in place of one log-softmax: softmax in fp32, step by step."""
    x, y, phase = call.args[0], replace(call.outputs[0], dtype=PRECISE), call.phase
    if x.dtype != PRECISE:
        cast = replace(x, dtype=PRECISE, storage=next(fresh))
        yield OpCall(op=CAST, args=(x,), outputs=(cast,), phase=phase)
        x = cast
    maximum, total = (per_token(y, fresh) for _ in range(2))
    for name, inputs, out in (
        ("amax.default", (x, (-1,), True), maximum),
        ("sub.Tensor", (x, maximum), y),
        ("exp.default", (y,), y),
        ("sum.dim_IntList", (y, (-1,), True), total),
        ("div.Tensor", (y, total), y),
    ):
        yield OpCall(op=f"aten.{name}", args=inputs, outputs=(out,), phase=phase)


def _backward(run: Sequence[OpCall], fresh: Iterator[int]) -> Iterator[OpCall]:
    """Megatron-LM's calls in place of ``run`` (of ``_gradient_calls``): one product, and a cast."""
    probabilities, dx = replace(run[0].args[1], dtype=PRECISE), run[-1].outputs[0]
    phase = run[0].phase
    product = dx if dx.dtype == PRECISE else replace(dx, dtype=PRECISE, storage=next(fresh))
    factors = (probabilities, per_token(probabilities, fresh))
    yield OpCall(op="aten.mul.Tensor", args=factors, outputs=(product,), phase=phase)
    if product is not dx:
        yield OpCall(op=CAST, args=(product,), outputs=(dx,), phase=phase)


def per_token(logits: TensorSpec, fresh: Iterator[int]) -> TensorSpec:
    """A new tensor of one number per token."""
    return replace(logits, shape=(*logits.shape[:-1], 1), stride=(), storage=next(fresh))
