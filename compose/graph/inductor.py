"""Kernels that torch.compile's inductor makes of a step's pointwise ops, reductions and norms.

A kernel goes over its elements in one order, and reads and writes each tensor once:

- Neighbouring ops over as many elements are one kernel, with the ops on a number per row that they
  make or read, and copies by index (``cat``, ``flip``) as loads.
- A reduction over other dimensions than the last ones goes in another order: it is a kernel of its
  own, which computes its pointwise inputs again. So are the weights' gradients of a norm.
- Backward computes pointwise results of forward again, where that saves no more bytes than it keeps
  (AOTAutograd's min-cut: torch/_functorch/partitioners.py).

Source of fusion: torch/_inductor/scheduler.py and codegen/simd.py in https://github.com/pytorch/pytorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.rewrite import StepBuilder
from itercast.microbench.ops import find_family
from itercast.microbench.ops.memory.elementwise_names import ALLOCATIONS, SAME_AS
from itercast.microbench.ops.memory.fused import CALL

COMPILED_PHASES = ("forward", "loss", "backward")
FILLS = ("bernoulli_", "uniform_", "normal_", "random_", "exponential_", "fill_", "zero_")
LOADS = {  # ops of family index without indices
    *("cat", "stack", "flip", "roll", "tril", "triu", "constant_pad_nd", "slice_backward"),
    *("select_backward", "narrow_copy", "repeat"),
}
NORM_GRADIENTS = ("native_layer_norm_backward", "_fused_rms_norm_backward")


def inductor_kernels(
    capture: StepCapture, *, apart: Callable[[OpCall], bool] = lambda call: False
) -> StepCapture:
    """The step with the kernels that inductor makes; calls for which ``apart`` is true stay.

    Ops of a captured program are fused within one call of a compiled function.
    """
    capture = _with_norm_gradients_apart(without_allocations(capture), apart)
    calls = capture.calls
    fusible = [(is_fusible(c) or _is_load(c)) and not apart(c) for c in calls]
    uses = _Uses(calls, fusible)
    made, stretch = StepBuilder(capture), list[int]()

    def flush() -> None:
        kernels = (uses.call(kernel) for kernel in _kernels(stretch, uses))
        made.calls.extend(call for call in kernels if call is not None)
        for i in stretch:
            made.done(i)
        stretch.clear()

    for index, call in enumerate(calls):
        if stretch and not (fusible[index] and _place(call) == _place(calls[stretch[-1]])):
            flush()
        if fusible[index]:
            stretch.append(index)
        else:
            made.add(index, call)
    flush()
    return made.step()


def without_allocations(capture: StepCapture) -> StepCapture:
    """The step without calls that launch nothing: empty tensors, and views that are no aten views.

    In a kernel they would be tensors to read and write.
    """
    made = StepBuilder(capture)
    for i, call in enumerate(capture.calls):
        if SAME_AS.get(_name(call), _name(call)) in ALLOCATIONS:
            made.done(i)
        else:
            made.add(i, call)
    return made.step()


def read_by(call: OpCall) -> Sequence[TensorSpec]:
    """The tensors that a call reads: one that it fills in place, as dropout's masks, is none."""
    return call.tensors()[1:] if _name(call) in FILLS else call.tensors()


def is_fusible(call: OpCall) -> bool:
    """Whether a call is of a family whose ops are fused with their neighbours."""
    family, _ = find_family(call)
    return call.phase in COMPILED_PHASES and family is not None and family.fusible


def _is_load(call: OpCall) -> bool:
    """Whether inductor loads a call's inputs by index where their reader is computed."""
    family, params = find_family(call)
    known = call.phase in COMPILED_PHASES and family is not None and family.name == "index"
    return known and params.op in LOADS


def size_of(call: OpCall) -> int:
    """Elements of the largest tensor that a call reads or writes."""
    return max((t.numel for t in call.touched), default=0)


def _place(call: OpCall) -> tuple[str, int, int]:
    return call.phase, call.stream, call.compiled


def _name(call: OpCall) -> str:
    return call.op.split(".")[1] if "." in call.op else call.op


def _is_pointwise(call: OpCall) -> bool:
    family, _ = find_family(call)
    return family is not None and family.name in ("elementwise", "index")


def _is_over_columns(call: OpCall) -> bool:
    """Whether a call reduces other dimensions than the last ones, or sums a norm's gradients."""
    family, params = find_family(call)
    if family is None or family.name not in ("reduction", "norm"):
        return False
    if _name(call) in NORM_GRADIENTS:
        return call.outputs[0].numel < size_of(call)
    inner = getattr(params, "inner", 1)
    return bool(inner > 1 and call.outputs[0].numel < size_of(call) and "nll" not in params.op)


def _with_norm_gradients_apart(
    capture: StepCapture, apart: Callable[[OpCall], bool]
) -> StepCapture:
    """The step with the gradients of norms' weights as calls of their own, where inductor runs."""
    made = StepBuilder(capture)
    for i, call in enumerate(capture.calls):
        weights = tuple(t for t in call.outputs[1:] if t.numel < call.outputs[0].numel)
        fused = _name(call) in NORM_GRADIENTS and is_fusible(call) and not apart(call)
        if fused and weights:
            made.calls.append(replace(call, outputs=call.outputs[:1]))
            call = replace(call, outputs=weights)
        made.add(i, call)
    return made.step()


@dataclass
class _Kernel:
    """Calls of one kernel over ``size`` elements; ``again``: of these what others make, too."""

    size: int
    columns: bool
    members: list[int] = field(default_factory=list)
    again: Set[int] = frozenset()


class _Uses:
    """Who makes and reads each storage of a step, and what backward computes again from what."""

    def __init__(self, calls: Sequence[OpCall], fusible: Sequence[bool]) -> None:
        self.calls, self.fusible = calls, fusible
        self.makers: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = {}
        self.given = set[int]()  # storages that are there before the step
        for i, call in enumerate(calls):
            for t in read_by(call):
                self.readers.setdefault(t.storage, []).append(i)
                if t.storage not in self.makers:
                    self.given.add(t.storage)
            for t in call.outputs:
                self.makers.setdefault(t.storage, []).append(i)
        self.again = self._computed_again()

    def maker(self, storage: int) -> int | None:
        """The call that alone writes a storage, where one does."""
        made = self.makers.get(storage, ())
        return made[0] if len(made) == 1 and storage not in self.given else None

    def _leaves(self, t: TensorSpec) -> dict[int, TensorSpec]:
        """What pointwise ops of forward make a tensor of, by storage; itself where none do."""
        found, seen, todo = dict[int, TensorSpec](), {t.storage}, [t]
        while todo:
            one = todo.pop()
            at = self.maker(one.storage)
            if at is None or not self.fusible[at] or not _is_pointwise(self.calls[at]):
                found[one.storage] = one
                continue
            todo += [x for x in self.calls[at].tensors() if x.storage not in seen]
            seen |= {x.storage for x in todo}
        return found

    def _computed_again(self) -> Mapping[int, tuple[TensorSpec, ...]]:
        """By storage of a forward's result that backward computes again: what it reads for it."""
        phases = [call.phase for call in self.calls]
        kept: dict[int, TensorSpec] = {}
        for i, call in enumerate(self.calls):
            if phases[i] == "backward":
                tensors = (t for t in call.tensors() if t.storage not in kept)
                made = ((t, self.makers.get(t.storage)) for t in tensors)
                kept |= {t.storage: t for t, at in made if not at or phases[at[0]] != "backward"}
        again: dict[int, tuple[TensorSpec, ...]] = {}
        saved = set(kept)
        for storage, t in kept.items():
            readers = [i for i in self.readers[storage] if phases[i] == "backward"]
            leaves = self._leaves(t)
            if storage in leaves or not all(self.fusible[i] for i in readers):
                continue
            if all(len(self.makers.get(name, ())) <= (name not in self.given) for name in leaves):
                added = sum(x.nbytes for name, x in leaves.items() if name not in saved)
                if added <= t.nbytes:
                    again[storage] = tuple(leaves.values())
                    saved |= set(leaves)
        return again

    def reads(self, i: int) -> Iterable[TensorSpec]:
        """What a call reads: in backward what it computes forward's results from."""
        for t in read_by(self.calls[i]):
            in_backward = self.calls[i].phase == "backward"
            yield from self.again.get(t.storage, (t,)) if in_backward else (t,)

    def is_needed(self, t: TensorSpec, kernel: _Kernel) -> bool:
        """Whether a kernel writes a result: another kernel reads it, or the step ends with it."""
        readers = set(self.readers.get(t.storage, ()))
        if t.storage in self.given or max(self.makers[t.storage]) >= max(readers, default=0):
            return True
        if t.storage in self.again:
            readers = {i for i in readers if self.calls[i].phase != "backward"}
        return not readers <= {*kernel.members, *kernel.again}

    def call(self, kernel: _Kernel) -> OpCall | None:
        """One call in place of a kernel's calls; None where nobody reads what they make."""
        calls = [self.calls[i] for i in kernel.members]
        made: dict[int, TensorSpec] = {}
        read: dict[int, TensorSpec] = {}
        for i, call in zip(kernel.members, calls, strict=True):
            for t in self.reads(i):
                if t.storage not in made and t.numel >= getattr(read.get(t.storage), "numel", 0):
                    read[t.storage] = t
            made |= {t.storage: t for t in call.outputs}
        written = [t for t in made.values() if self.is_needed(t, kernel)]
        if kernel.columns:
            sums = {t.storage for c in calls if not _is_pointwise(c) for t in c.outputs}
            sums |= {t.storage for c in calls if size_of(c) < kernel.size for t in c.outputs}
            written = [t for t in written if t.storage in sums]
        if not written and kernel.again:
            return None
        return kernel_call(calls, tuple(read.values()), tuple(written) or calls[-1].outputs)


def _kernels(stretch: Sequence[int], uses: _Uses) -> list[_Kernel]:
    """Groups consecutive fusible calls into kernels, in the order that they run in."""
    kernels: list[_Kernel] = []
    home: dict[int, int] = {}  # storage -> number of the kernel that makes it
    for i in stretch:
        call = uses.calls[i]
        size, columns = size_of(call), _is_over_columns(call)
        sources = {home[t.storage] for t in call.tensors() if t.storage in home}
        again = list(_producers(call, stretch, uses)) if columns else []
        first = 0 if again else max(sources, default=0)
        joined = (
            number
            for number in reversed(range(first, len(kernels)))
            if _joins(i, kernels[number], number in sources, stretch[-1], uses)
        )
        at = next(joined, len(kernels))
        if at == len(kernels):
            kernels.append(_Kernel(size=size, columns=columns))
        kernel = kernels[at]
        kernel.size = max(kernel.size, size)
        kernel.members += [j for j in again if j not in kernel.members] + [i]
        for number, other in enumerate(kernels):
            if number != at and again:
                other.again = other.again | {i, *again}
        home |= {t.storage: at for t in call.outputs}
    return kernels


def _joins(i: int, kernel: _Kernel, reads: bool, last: int, uses: _Uses) -> bool:
    """Whether a call becomes part of a kernel, some of whose results it ``reads`` or does not.

    ``last``: the last call that may be fused with it.
    """
    call = uses.calls[i]
    size, columns = size_of(call), _is_over_columns(call)
    if reads and _is_load(call) and not all(map(_is_pointwise, _made(call, kernel, uses))):
        return False  # it would read what other threads compute
    if kernel.columns:
        return size == kernel.size if columns else reads and size < kernel.size
    if columns:
        return False
    if size > kernel.size:
        return reads and all(_is_pointwise(uses.calls[j]) for j in kernel.members)
    if size == kernel.size or reads:
        return True
    readers = (j for t in call.outputs for j in uses.readers.get(t.storage, ()) if j <= last)
    return any(size_of(uses.calls[j]) == kernel.size for j in readers)


def _made(call: OpCall, kernel: _Kernel, uses: _Uses) -> list[OpCall]:
    """The calls of a kernel that make what a call reads."""
    read = {t.storage for t in call.tensors()}
    made = (uses.calls[i] for i in kernel.members)
    return [c for c in made if read & {t.storage for t in c.outputs}]


def _producers(call: OpCall, stretch: Sequence[int], uses: _Uses) -> Iterator[int]:
    """Pointwise calls of a stretch that a sum over columns computes again, in their order."""
    found = set[int]()
    todo = list(call.tensors())
    while todo:
        t = todo.pop()
        at = uses.maker(t.storage)
        if at is None or at in found or at < stretch[0] or not _is_pointwise(uses.calls[at]):
            continue
        if max(uses.readers[t.storage]) <= stretch[-1]:
            found.add(at)
            todo += uses.calls[at].tensors()
    yield from sorted(found)


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
    """What a kernel of these calls reads of its full-size inputs a second time, and of one row.

    A norm, a softmax, and a reduction whose result a later call uses need all of a row before they
    write any of it. inductor's loops over a row then run again (torch/_inductor/codegen/triton.py;
    its softmax finds maximum and sum in one loop from torch 2.8 on).
    """
    size = max(map(size_of, calls))
    full_bytes = sum(t.nbytes for t in inputs if t.numel == size)
    awaited = (_rows_awaited(c, calls[i + 1 :], backward) for i, c in enumerate(calls))
    rows = [n for n in awaited if n]
    return {
        "again_bytes": len(rows) * full_bytes,
        "row_bytes": full_bytes // min(rows) if rows else 0,
    }


def _rows_awaited(call: OpCall, later: Sequence[OpCall], backward: bool) -> int:
    """Number of rows that a call normalises, or reduces for a later call; 0 for others."""
    family, _ = find_family(call)
    name, result = _name(call), call.outputs[0]
    if family is None or ("backward" in name and (not backward or _is_over_columns(call))):
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
    made = {result.storage}
    for c in later:
        if made & {t.storage for t in c.tensors()}:
            if size_of(c) == size_of(call):
                return result.numel
            made |= {t.storage for t in c.outputs}
    return 0
