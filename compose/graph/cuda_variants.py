"""Replaces the calls of a step captured on a CPU by those that PyTorch runs on a GPU.

- Dropout: three calls on a CPU (draw, scale, multiply), one kernel on a GPU, which keeps a mask of
  one byte per element for backward (aten/src/ATen/native/Dropout.cpp, cuda/Dropout.cu).
- Softmax in fp32 of an fp16 tensor: the GPU kernel reads fp16 itself and its backward writes fp16,
  so that the casts around it vanish (aten/src/ATen/native/SoftMax.cpp, ``half_to_float``).
- Recurrent networks, step by step on a CPU, are one call of cuDNN forward and one backward
  (aten/src/ATen/native/cudnn/RNN.cpp); so they are on a CPU whose rows show them whole.
- Attention without a fused kernel leaves its weights for backward (``_with_weights``).
- Allocations launch no kernel.
- Images are NHWC where the step says ``channels_last``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from math import prod

from itercast.capture.opcall import CELLS, Argument, OpCall, StepCapture, TensorSpec
from itercast.compose.graph.attention_kernels import SDPA, SDPA_OPS, SIXTEEN_BIT
from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.graph.rewrite import StepBuilder, fresh_storages, with_tensors
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.matrix.attention import BEFORE_AMPERE
from itercast.microbench.ops.matrix.recurrent import CALL, Recurrent, cell_of, saved_numel
from itercast.microbench.ops.memory.elementwise_names import ALLOCATIONS, SAME_AS

DROPOUT_DRAW = ("bernoulli_", "div_")
SOFTMAX = ("_softmax", "_log_softmax")
SOFTMAX_BACKWARD = ("_softmax_backward_data", "_log_softmax_backward_data")
EVENTS = ("view_op", "autograd_node")  # of the host: some for each call
GROUP_NORM = "aten.native_group_norm.default"
NHWC_OPS = tuple(
    f"aten.{name}.default"
    for name in (
        "convolution",
        "convolution_backward",
        "native_batch_norm",
        "native_batch_norm_backward",
    )
)


def with_byte_masks(capture: StepCapture) -> StepCapture:
    """Returns the step with dropout masks of one byte per element, as GPUs keep them."""
    masks = {c.args[0].storage for c in capture.calls if _name(c) == "bernoulli_"}
    if not masks:
        return capture
    tensors = {t for c in capture.calls for t in c.touched if t.storage in masks}
    change = {t: replace(t, dtype="bool") for t in tensors}
    return replace(capture, calls=tuple(with_tensors(c, change) for c in capture.calls))


def with_whole_networks(capture: StepCapture, cells: Collection[str] = CELLS) -> StepCapture:
    """Returns the step with one call for each pass of a recurrent network of these cells.

    In forward the new call takes the place of the last call that it replaces, after casts of its
    weights; in backward that of the first. The host's views and autograd nodes are fewer
    accordingly.
    """
    numbers = [n for n, facts in enumerate(capture.networks, 1) if cell_of(facts["op"]) in cells]
    passes: dict[int, list[int]] = {}  # number of a pass -> indices of its calls
    for i, call in enumerate(capture.calls):
        if call.within in numbers:
            passes.setdefault(call.within, []).append(i)
    if not passes:
        return capture
    builder, whole_calls = StepBuilder(capture), _whole_calls(capture, passes)
    replacements = {  # by the index at which it comes
        indices[-1] if _is_forward(number) else indices[0]: whole_calls[number]
        for number, indices in passes.items()
    }
    for i, call in enumerate(capture.calls):
        if call.within not in passes or i in replacements:
            builder.calls.append(replacements.get(i, call))
        builder.done(i)
    removed = sum(map(len, passes.values())) - len(replacements)
    kept_frac = 1 - removed / sum(call.phase != "optimizer" for call in capture.calls)
    fewer = {e: round(kept_frac * count) for e, count in capture.host.items() if e in EVENTS}
    return replace(builder.step(), host={**capture.host, **fewer})


def _is_forward(number: int) -> bool:
    """Whether a pass is forward: passes 2n - 1 and 2n are forward and backward of network n."""
    return number % 2 == 1


def _network_of(number: int) -> int:
    """The network of a pass; 0 of number 0, which calls outside of networks have."""
    return (number + 1) // 2


def _whole_calls(capture: StepCapture, passes: Mapping[int, Sequence[int]]) -> Mapping[int, OpCall]:
    """The one call of each pass of a recurrent network, by the pass's number (``_is_forward``).

    It reads and writes what the pass's own calls share with others. Tensors that only the network
    reads (``inner``) become one tensor of ``saved_numel`` numbers, which forward leaves for
    backward. ``passes``: indices of each pass's calls.
    """
    readers: dict[int, set[int]] = {}  # by storage: networks whose calls read it, 0 for others
    for call in capture.calls:
        for t in call.tensors():
            readers.setdefault(t.storage, set()).add(_network_of(call.within))
    unused, whole, inner = next(fresh_storages(capture)), dict[int, OpCall](), set[int]()
    for number, indices in sorted(passes.items()):
        calls, network = [capture.calls[i] for i in indices], _network_of(number)
        p = Recurrent(**capture.networks[number - 1])
        written = {t.storage: t for c in calls for t in c.outputs}
        inner |= {s for s in written if not readers.get(s, set()) - {network}}
        read = {t.storage: t for c in calls for t in c.tensors()}
        args = [t for s, t in read.items() if s not in inner | written.keys()]
        outputs = [t for s, t in written.items() if s not in inner] or [*calls[-1].outputs]
        if {2 * network - 1, 2 * network} <= passes.keys():  # both: forward saves for backward
            shape, storage = (saved_numel(p),), unused + network
            saved = TensorSpec(shape=shape, dtype=p.dtype, storage=storage)
            (outputs if _is_forward(number) else args).append(saved)
        whole[number] = replace(
            calls[0], op=CALL, args=(*args,), kwargs=asdict(p), outputs=(*outputs,), within=0
        )
    return whole


@cached_by_identity
def with_cuda_variants(capture: StepCapture, gpu: Gpu) -> StepCapture:
    """Returns the step as a GPU runs it; ``capture`` has gone through ``with_byte_masks``.

    Where the call that completes a parameter's gradient (``ready_after``) is removed, the last call
    kept before it takes its place.
    """
    capture = _with_weights(capture, gpu)
    masks = {c.args[0].storage for c in capture.calls if _name(c) == "bernoulli_"}
    builder, fused = StepBuilder(capture), _fused_casts(capture.calls)
    for i, call in enumerate(capture.calls):
        builder.calls += () if i in fused else _on_gpu(call, masks)
        builder.done(i)
    return builder.step()


def _name(call: OpCall) -> str:
    """The name of an aten op without namespace and overload; "" for other ops."""
    return call.op.split(".")[1] if call.op.startswith("aten.") else ""


def _with_weights(capture: StepCapture, gpu: Gpu) -> StepCapture:
    """The step with what attention without a fused kernel leaves for its backward.

    Where keys have fewer heads than queries the kernel for fp32 and masks, memory-efficient, does
    not run, nor flash attention on either. What does keeps the weights of all pairs, scaled queries
    and keys, and values, with as many heads as the queries; they are one tensor here. Source:
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, attention.cpp (_math).
    """
    fresh, calls = fresh_storages(capture), list[OpCall]()
    saved_of: dict[tuple[int, ...], TensorSpec] = {}  # by the storages of queries, keys, values
    for call in capture.calls:
        if _is_unfused(call, gpu):
            forward = call.op == SDPA
            q, k, v = qkv = call.args[:3] if forward else call.args[1:4]
            heads, pairs = prod(q.shape[:-2]), q.shape[-2] * k.shape[-2]
            inputs = q.shape[-2] * q.shape[-1] + k.shape[-2] * (k.shape[-1] + v.shape[-1])
            shape = (heads * (pairs + inputs),)
            saved = TensorSpec(shape=shape, dtype=q.dtype, storage=next(fresh))
            saved = saved_of.setdefault(tuple(t.storage for t in qkv), saved)
            if forward:
                call = replace(call, outputs=(*call.outputs, saved))
            else:  # beside it, gradients of the weights and of the scores, one per pair each
                shape = (2 * heads * pairs,)
                gradients = TensorSpec(shape=shape, dtype=q.dtype, storage=next(fresh))
                unread = (replace(t, storage=-1) for t in qkv)
                args = (call.args[0], *unread, *call.args[4:], saved)
                call = replace(call, args=args, outputs=(*call.outputs, gradients))
        calls.append(call)
    return replace(capture, calls=tuple(calls)) if saved_of else capture


def _is_unfused(call: OpCall, gpu: Gpu) -> bool:
    """Whether no fused kernel computes an attention of this kind: it has grouped queries."""
    if call.op not in SDPA_OPS:
        return False
    q, k = call.args[:2] if call.op == SDPA else call.args[1:3]
    grouped = len(q.shape) > 3 and q.shape[-3] != k.shape[-3]
    flash = q.dtype in SIXTEEN_BIT and gpu.architecture not in BEFORE_AMPERE
    return grouped and (not flash or bool(call.kwargs.get("masked")))


def _fused_casts(calls: Sequence[OpCall]) -> set[int]:
    """Returns the indices of casts that the softmax kernel next to them does itself."""
    fused = set()
    for i, (first, second) in enumerate(pairwise(calls)):
        if not {t.storage for t in first.outputs} & {t.storage for t in second.tensors()}:
            continue
        if _name(second) in SOFTMAX and _cast_dtypes(first) == ("fp16", "fp32"):
            fused.add(i)
        elif _name(first) in SOFTMAX_BACKWARD and _cast_dtypes(second) == ("fp32", "fp16"):
            fused.add(i + 1)
    return fused


def _cast_dtypes(call: OpCall) -> tuple[str, str] | None:
    """Returns (from, to) of a cast; None for any other call."""
    if _name(call) != "_to_copy":
        return None
    return call.args[0].dtype, call.outputs[0].dtype


def _on_gpu(call: OpCall, masks: set[int]) -> Iterator[OpCall]:
    """Yields what runs on a GPU in place of a call: itself, a dropout kernel, or nothing."""
    name = _name(call)
    if SAME_AS.get(name, name) in ALLOCATIONS:
        return
    if name in DROPOUT_DRAW and call.args[0].storage in masks:
        return
    if name != "mul" or not any(t.storage in masks for t in call.tensors()):
        yield call
        return
    data = tuple(t for t in call.tensors() if t.storage not in masks)[:1]
    mask = next(t for t in call.tensors() if t.storage in masks)
    if call.phase == "backward":
        op, args, outputs = "native_dropout_backward", (*data, mask), call.outputs
    else:
        op, args, outputs = "native_dropout", data, (*call.outputs, mask)
    yield replace(call, op=f"aten.{op}.default", args=args, outputs=outputs)


def with_memory_format(capture: StepCapture, stated: str) -> StepCapture:
    """Gives the inputs of convolutions and batch norms NHWC strides where ``stated`` is "nhwc".

    Steps with a group norm are left as they are: its kernels read and write NCHW, so that images
    are copied before and after it and nothing is gained (aten/src/ATen/native/group_norm.cpp).
    """
    if stated != "nhwc" or any(c.op == GROUP_NORM for c in capture.calls):
        return capture
    calls = (
        replace(c, args=tuple(map(_in_nhwc, c.args))) if c.op in NHWC_OPS else c
        for c in capture.calls
    )
    return replace(capture, calls=tuple(calls))


def _in_nhwc(value: Argument) -> Argument:
    """A 4-dimensional tensor (N, C, H, W) with the strides of NHWC; anything else unchanged."""
    if not isinstance(value, TensorSpec) or len(value.shape) != 4:
        return value
    channels, width = value.shape[1], value.shape[3]
    return replace(value, stride=(prod(value.shape[1:]), 1, width * channels, channels))
