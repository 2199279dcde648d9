"""Builds the call of a fused kernel: which tensors it reads, writes, and reads twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from itercast.capture.opcall import OpCall, TensorSpec
from itercast.microbench.ops import find_family
from itercast.microbench.ops.memory.fused import CALL

NORM_GRADIENTS = ("native_layer_norm_backward", "_fused_rms_norm_backward")
FILLS = ("bernoulli_", "uniform_", "normal_", "random_", "exponential_", "fill_", "zero_")
SHAPED_AS = ("ones_like", "zeros_like", "full_like")


def size_of(call: OpCall) -> int:
    """Elements of the largest tensor that a call reads or writes."""
    return max((t.numel for t in call.touched), default=0)


def name_of(call: OpCall) -> str:
    """The op's name without namespace and overload: ``add`` of ``aten.add.Tensor``."""
    return call.op.split(".")[1] if "." in call.op else call.op


def read_by(call: OpCall) -> Sequence[TensorSpec]:
    """The tensors whose values a call reads: not one that it fills, or takes only the shape of."""
    return call.tensors()[1:] if name_of(call) in (*FILLS, *SHAPED_AS) else call.tensors()


class MakersAndReaders:
    """The calls that make and that read each storage of a step, by their index.

    ``reads`` returns the tensors that count as read by a call; ``makes`` says whether its results
    count.
    """

    def __init__(
        self,
        calls: Sequence[OpCall],
        reads: Callable[[OpCall], Iterable[TensorSpec]] = read_by,
        makes: Callable[[OpCall], bool] = lambda call: True,
    ) -> None:
        self.calls = calls
        self.makers: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = {}
        self.given = set[int]()  # storages that are there before the step
        for i, call in enumerate(calls):
            for t in reads(call):
                self.readers.setdefault(t.storage, []).append(i)
                if t.storage not in self.makers:
                    self.given.add(t.storage)
            for t in call.outputs if makes(call) else ():
                self.makers.setdefault(t.storage, []).append(i)


def is_over_columns(call: OpCall) -> bool:
    """Whether a call reduces dimensions before the last, or sums a norm's weight gradients."""
    family, params = find_family(call)
    if family is None or family.name not in ("reduction", "norm"):
        return False
    if name_of(call) in NORM_GRADIENTS:
        return call.outputs[0].numel < size_of(call)
    inner = getattr(params, "inner", 1)  # elements behind the reduced dimensions
    reduces = call.outputs[0].numel < size_of(call) and "nll" not in params.op  # which picks some
    return bool(inner > 1 and reduces)


def kernel_call(
    calls: Sequence[OpCall],
    read: tuple[TensorSpec, ...],
    written: tuple[TensorSpec, ...],
    *,
    backward: bool = True,
) -> OpCall:
    """One call in place of these, which reads and writes these tensors.

    ``backward``: backward passes of norms and softmax read their rows again, too.
    """
    facts = {"ops": len(calls), "numel": max(map(size_of, calls))}
    facts |= _read_again(calls, read, backward)
    return replace(calls[0], op=CALL, args=read, kwargs=facts, outputs=written, within=0)


def _read_again(
    calls: Sequence[OpCall], inputs: Sequence[TensorSpec], backward: bool
) -> dict[str, int]:
    """Bytes of full-size inputs that the kernel of these calls reads twice, and bytes of one row.

    A norm, a softmax, and a reduction whose result a later call uses need all of a row before they
    write any of it. inductor's loops over a row then run again (torch/_inductor/codegen/triton.py;
    its softmax finds maximum and sum in one loop from torch 2.8 on).
    """
    size = max(map(size_of, calls))
    full_bytes = sum(t.nbytes for t in inputs if t.numel == size)
    awaited = (_rows_awaited(c, calls[i + 1 :], backward) for i, c in enumerate(calls))
    row_counts = [count for count in awaited if count]  # of each call that needs rows as a whole
    return {
        "again_bytes": len(row_counts) * full_bytes,
        "row_bytes": full_bytes // min(row_counts) if row_counts else 0,
    }


def _rows_awaited(call: OpCall, later: Sequence[OpCall], backward: bool) -> int:
    """Number of rows that a call normalises, or reduces for a later call; 0 for others."""
    family, _ = find_family(call)
    name, result = name_of(call), call.outputs[0]
    if family is None or ("backward" in name and (not backward or is_over_columns(call))):
        return 0
    if name in ("_softmax", "_log_softmax"):
        return int(result.numel // max(1, result.shape[call.args[1]]))
    if name.endswith("softmax_backward_data"):
        return int(result.numel // max(1, result.shape[call.args[2]]))
    if family.name == "norm" and "backward" in name:
        return call.tensors()[2].numel  # after gradient and input: mean; of batch norms weight
    if family.name == "norm":  # outputs: result, mean, ...
        return call.outputs[1].numel if len(call.outputs) > 1 else 0
    if family.name != "reduction" or result.numel == size_of(call):
        return 0
    written = {result.storage}
    for c in later:
        if written & {t.storage for t in c.tensors()}:
            if size_of(c) == size_of(call):
                return result.numel
            written |= {t.storage for t in c.outputs}
    return 0
