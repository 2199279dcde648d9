"""What a capture on a CPU shows and a GPU runs differently: calls exchanged before pricing.

Dropout is drawn, scaled and multiplied by three calls on a CPU and by one kernel on a GPU, which
keeps a mask of one byte an element for backward. A softmax in fp32 reads fp16 as it is, and its
backward writes fp16. Allocations launch nothing there. Source: Dropout.cpp, cuda/Dropout.cu and
SoftMax.cpp (half_to_float) in aten/src/ATen/native.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from compose.graph.identity_cache import remembered
from microbench.opcall import OpCall, StepCapture, TensorSpec
from microbench.ops.memory.elementwise_names import ALLOCATIONS, SAME_AS

DRAW = ("bernoulli_", "div_")
SOFTMAX = ("_softmax", "_log_softmax")
SOFTMAX_BACKWARD = ("_softmax_backward_data", "_log_softmax_backward_data")


@remembered
def as_on_gpu(capture: StepCapture) -> StepCapture:
    """The step as a GPU runs it; a gradient is ready after the last call that is left."""
    masks = {c.args[0].storage for c in capture.calls if _name(c) == "bernoulli_"}
    calls: list[OpCall] = []
    moved: dict[int, int] = {}
    fused = _fused_casts(capture.calls)
    for i, call in enumerate(capture.calls):
        calls.extend(() if i in fused else _on_gpu(call, masks))
        moved[i] = len(calls) - 1
    parameters = tuple(
        replace(p, ready_after=moved.get(p.ready_after, p.ready_after)) for p in capture.parameters
    )
    return replace(capture, calls=tuple(calls), parameters=parameters)


def _name(call: OpCall) -> str:
    return call.op.split(".")[1] if call.op.startswith("aten.") else ""


def _fused_casts(calls: Sequence[OpCall]) -> set[int]:
    """Indices of casts that a softmax next to them does itself."""
    found = set()
    for i, (first, second) in enumerate(pairwise(calls)):
        if not {t.storage for t in first.outputs} & {t.storage for t in second.tensors()}:
            continue
        if _name(second) in SOFTMAX and _casts(first) == ("fp16", "fp32"):
            found.add(i)
        elif _name(first) in SOFTMAX_BACKWARD and _casts(second) == ("fp32", "fp16"):
            found.add(i + 1)
    return found


def _casts(call: OpCall) -> tuple[str, str] | None:
    """The dtypes a copy is from and to; None for any other call."""
    if _name(call) != "_to_copy":
        return None
    return call.args[0].dtype, call.outputs[0].dtype


def _on_gpu(call: OpCall, masks: set[int]) -> Iterator[OpCall]:
    """The calls that stand for one: itself, a dropout, or none."""
    name = _name(call)
    if SAME_AS.get(name, name) in ALLOCATIONS:
        return
    if name in DRAW and call.args[0].storage in masks:
        return
    if name != "mul" or not any(t.storage in masks for t in call.tensors()):
        yield call
        return
    data = tuple(t for t in call.tensors() if t.storage not in masks)[:1]
    mask = TensorSpec(shape=call.outputs[0].shape, dtype="bool")
    if call.phase == "backward":
        op, args, outputs = "native_dropout_backward", (*data, mask), call.outputs
    else:
        op, args, outputs = "native_dropout", data, (*call.outputs, mask)
    yield replace(call, op=f"aten.{op}.default", args=args, outputs=outputs)
