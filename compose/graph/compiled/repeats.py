"""Equal ops and messages on equal tensors of a compiled step: torch.compile runs one of them.

torchao's fp8 layers look for the largest number of a weight, and cast it, in forward and again in
backward; queries, keys and values cast the same input. Layers that ``ColwiseParallel`` cuts gather
theirs one by one, which is the same for queries, keys and values. Source: ``fx_graph_cse`` in
torch/_functorch/compile_utils.py in https://github.com/pytorch/pytorch, of forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.compiled.inductor import COMPILED_PHASES
from itercast.compose.graph.rewrite import COLLECTIVE, StepBuilder, with_tensors
from itercast.microbench.ops import find_family

FAMILIES = ("elementwise", "index", "reduction")  # no random numbers


def without_repeats(
    capture: StepCapture, *, apart: Callable[[OpCall], bool] = lambda call: False
) -> StepCapture:
    """The step with repeated calls removed; readers of a removed result read the first one's.

    Calls for which ``apart`` is true stay. Captures do not say where in its memory a tensor begins,
    so that only calls on whole tensors are compared, or on all parts of one (``cat`` of a gathered
    one).
    """
    repeats, builder = _Repeats(capture), StepBuilder(capture)
    for i, call in enumerate(capture.calls):
        same = {t: replace(t, storage=repeats.same[t.storage]) for t in repeats.renamed(call)}
        call = with_tensors(call, same)
        if call.phase in COMPILED_PHASES and not apart(call) and repeats.is_whole(call):
            first = repeats.first.setdefault(repeats.key(call), call)
            if first is not call:
                for repeat_result, first_result in zip(call.outputs, first.outputs, strict=True):
                    repeats.same[repeat_result.storage] = first_result.storage
                builder.done(i)
                continue
        repeats.writes.update((call.compiled, t.storage) for t in call.outputs)
        builder.add(i, call)
    return builder.step()


class _Repeats:
    """The calls met so far, by what they compute, and the storages of repeated results."""

    def __init__(self, capture: StepCapture) -> None:
        self.first: dict[Hashable, OpCall] = {}  # by ``key``
        self.same: dict[int, int] = {}  # storage of a repeat's result -> of the first one's
        self.writes = Counter[tuple[int, int]]()  # of a compiled function into a storage, so far
        self.makers = Counter(t.storage for c in capture.calls for t in c.outputs)
        self.largest: dict[int, int] = {}  # storage -> elements of the largest tensor in it
        for t in (t for c in capture.calls for t in c.touched):
            self.largest[t.storage] = max(t.numel, self.largest.get(t.storage, 0))

    def renamed(self, call: OpCall) -> list[TensorSpec]:
        """The tensors of a call that a repeat made: they are the first one's results now."""
        return [t for t in call.touched if t.storage in self.same]

    def is_whole(self, call: OpCall) -> bool:
        """Whether a call makes new tensors from whole ones alone, and nothing overwrites them."""
        family, _ = find_family(call)
        comparable = call.op == COLLECTIVE or (family is not None and family.name in FAMILIES)
        read_numel = Counter[int]()  # by storage
        for t in call.tensors():
            read_numel[t.storage] += t.numel
        reads_whole = all(n >= self.largest[storage] for storage, n in read_numel.items())
        only_writer = all(self.makers[t.storage] == 1 for t in call.outputs)
        return comparable and bool(read_numel and call.outputs) and reads_whole and only_writer

    def key(self, call: OpCall) -> Hashable:
        """Equal for calls with equal results: function, op, arguments and how often overwritten."""
        function = call.compiled, call.recomputed
        versions = tuple(self.writes[call.compiled, t.storage] for t in call.tensors())
        results = tuple((t.shape, t.dtype, t.stride) for t in call.outputs)
        return function, call.op, call.args, tuple(sorted(call.kwargs.items())), versions, results
