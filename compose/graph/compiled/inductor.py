"""Kernels that torch.compile's inductor makes of a step's pointwise ops, reductions and norms.

A kernel goes over its elements in one order, and reads and writes each tensor once:

- Neighbouring ops over as many elements are one kernel, with the ops on a number per row that they
  make or read, and copies by index (``cat``, ``flip``) as loads.
- A reduction over other dimensions than the last ones goes in another order: it is a kernel of its
  own, which computes its pointwise inputs again. So are the weights' gradients of a norm.
- A reduction to few numbers, each of many, is split among blocks: what reads its result is another
  kernel, which computes its pointwise inputs again.
- A product with a side that is no multiple of 16 bytes may have its operands padded.
- Backward computes pointwise results of forward again (``itercast.compose.graph.compiled.kept``).

Source of fusion: torch/_inductor/scheduler.py and codegen/simd.py in https://github.com/pytorch/pytorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import COMPLEX, PADDABLE, OpCall, StepCapture, TensorSpec
from itercast.compose.graph.compiled.fused_calls import (
    NORM_GRADIENTS,
    MakersAndReaders,
    is_over_columns,
    kernel_call,
    name_of,
    read_by,
    size_of,
)
from itercast.compose.graph.compiled.fusion_order import in_fusion_order
from itercast.compose.graph.compiled.kept import Again, is_backward, with_kept_rows
from itercast.compose.graph.compiled.padded_products import is_paddable
from itercast.compose.graph.rewrite import StepBuilder
from itercast.microbench.ops import find_family
from itercast.microbench.ops.memory.elementwise_names import ALLOCATIONS, SAME_AS

COMPILED_PHASES = ("forward", "loss", "backward")
LOADS = {  # ops of family index without indices
    *("cat", "stack", "flip", "roll", "tril", "triu", "constant_pad_nd", "slice_backward"),
    *("select_backward", "narrow_copy", "repeat"),
}
FEW_RESULTS, LONG_REDUCTION = assumed(__file__, "split_reductions")
MOST_READ = 4  # no assumption: realize_reads_threshold of torch/_inductor/config.py


def inductor_kernels(
    capture: StepCapture, *, apart: Callable[[OpCall], bool] = lambda call: False
) -> StepCapture:
    """The step with the kernels that inductor makes; calls for which ``apart`` is true stay.

    Ops of a captured program are fused within one call of a compiled function.
    """
    capture = _with_norm_gradients_apart(without_allocations(capture), apart)

    def fused(call: OpCall) -> bool:
        return (is_fusible(call) or _is_load(call)) and not apart(call)

    def movable(call: OpCall) -> bool:
        return fused(call) and _is_pointwise(call)

    if not any(map(fused, capture.calls)):
        return capture
    capture, again = with_kept_rows(capture, fused)
    capture = in_fusion_order(capture, fused, movable, _place)
    calls, fusible = capture.calls, list(map(fused, capture.calls))
    uses = _Uses(calls, again)
    builder, stretch = StepBuilder(capture), list[int]()  # consecutive fusible calls of one place

    def add_kernels_of_stretch() -> None:
        kernels = (uses.call(kernel) for kernel in _kernels(stretch, uses))
        builder.calls.extend(call for call in kernels if call is not None)
        for i in stretch:
            builder.done(i)
        stretch.clear()

    for index, call in enumerate(calls):
        if stretch and not (fusible[index] and _place(call) == _place(calls[stretch[-1]])):
            add_kernels_of_stretch()
        if fusible[index]:
            stretch.append(index)
        else:
            builder.add(index, call if apart(call) else _marked_if_paddable(call))
    add_kernels_of_stretch()
    return builder.step()


def without_allocations(capture: StepCapture) -> StepCapture:
    """The step without calls that launch nothing: empty tensors, and views by ops of other names.

    Otherwise a fused kernel would read and write them.
    """
    builder = StepBuilder(capture)
    for i, call in enumerate(capture.calls):
        if SAME_AS.get(name_of(call), name_of(call)) in ALLOCATIONS:
            builder.done(i)
        else:
            builder.add(i, call)
    return builder.step()


def is_fusible(call: OpCall) -> bool:
    """Whether a call is of a family whose ops are fused with their neighbours.

    inductor has no kernels for complex numbers: torch's own run (fallback in lowering.py).
    """
    family, _ = find_family(call)
    real = call.phase in COMPILED_PHASES and COMPLEX not in call.kwargs
    return real and family is not None and family.fusible


def _marked_if_paddable(call: OpCall) -> OpCall:
    """A product with the fact that inductor may pad its operands; other calls as they are."""
    product = call.phase in COMPILED_PHASES and is_paddable(find_family(call)[1])
    return replace(call, kwargs={**call.kwargs, PADDABLE: True}) if product else call


def _is_load(call: OpCall) -> bool:
    """Whether inductor compiles this call to indexed loads in the kernel that reads its result."""
    family, params = find_family(call)
    known = call.phase in COMPILED_PHASES and family is not None and family.name == "index"
    return known and params.op in LOADS


def _place(call: OpCall) -> tuple[str, int, int]:
    """Phase, stream and compiled function of a call; only calls that share these are fused."""
    return call.phase, call.stream, call.compiled


def _is_pointwise(call: OpCall) -> bool:
    family, _ = find_family(call)
    return family is not None and family.name in ("elementwise", "index")


def _with_norm_gradients_apart(
    capture: StepCapture, apart: Callable[[OpCall], bool]
) -> StepCapture:
    """The step with the gradients of norms' weights as calls of their own, where inductor runs."""
    builder = StepBuilder(capture)
    for i, call in enumerate(capture.calls):
        weights = tuple(t for t in call.outputs[1:] if t.numel < call.outputs[0].numel)
        fused = name_of(call) in NORM_GRADIENTS and is_fusible(call) and not apart(call)
        if fused and weights:
            builder.calls.append(replace(call, outputs=call.outputs[:1]))
            call = replace(call, outputs=weights)
        builder.add(i, call)
    return builder.step()


@dataclass
class _Kernel:
    """Calls (``members``, by index) of one kernel over ``size`` elements.

    ``columns``: it reduces other dimensions than the last. Other kernels compute some of its
    results again instead of reading them: calls in ``nonreaders`` read no result, pairs (call,
    storage) in ``unread`` mean that the call does not read that storage. ``copies``: storages that
    it computes again for its own calls, and does not write.
    """

    size: int
    columns: bool
    members: list[int] = field(default_factory=list)
    nonreaders: Set[int] = frozenset()
    unread: set[tuple[int, int]] = field(default_factory=set)
    copies: set[int] = field(default_factory=set)


class _Uses(MakersAndReaders):
    """Which results of calls are read, and by which.

    ``again``: storage of a result that backward computes again -> the tensors it reads for that.
    """

    def __init__(self, calls: Sequence[OpCall], again: Again) -> None:
        super().__init__(calls)
        self.again = again
        self.kept = {t.storage for leaves in self.again.values() for t in leaves}

    def maker(self, storage: int) -> int | None:
        """The call that alone writes a storage, where one does."""
        made = self.makers.get(storage, ())
        return made[0] if len(made) == 1 and storage not in self.given else None

    def last_reader(self, storage: int, call: OpCall) -> int:
        """Index of the last call that reads a storage, as seen from ``call``.

        From forward, readers in backward that compute it again do not count.
        """
        read = self.readers[storage]
        if storage in self.again and not is_backward(call):
            read = [i for i in read if not is_backward(self.calls[i])]
        return max(read)

    def leads_to(self, i: int, size: int, last: int) -> bool:
        """Whether a call up to ``last`` over ``size`` elements depends on call i.

        Paths are followed only through calls over other numbers of elements.
        """
        seen, todo = {i}, [i]
        while todo:
            made = {t.storage for t in self.calls[todo.pop()].outputs}
            readers = {
                j for storage in made for j in self.readers.get(storage, ()) if i < j <= last
            }
            if any(size_of(self.calls[j]) == size for j in readers):
                return True
            todo += readers - seen
            seen |= readers
        return False

    def reads(self, i: int) -> Iterable[TensorSpec]:
        """What call i reads; in backward, what recomputed results of forward are computed from."""
        for t in read_by(self.calls[i]):
            yield from self.again.get(t.storage, (t,)) if is_backward(self.calls[i]) else (t,)

    def is_needed(self, t: TensorSpec, kernel: _Kernel) -> bool:
        """Whether a kernel must write its result ``t``: other kernels read it, or it is kept."""
        readers = set(self.readers.get(t.storage, ()))
        if t.storage in kernel.copies:
            return False
        if t.storage in self.given or t.storage in self.kept:
            return True
        if max(self.makers[t.storage]) >= max(readers, default=0):
            return True
        if t.storage in self.again:
            readers = {i for i in readers if not is_backward(self.calls[i])}
        readers -= {i for i in readers if (i, t.storage) in kernel.unread}
        return not readers <= {*kernel.members, *kernel.nonreaders}

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
        if kernel.columns:  # its pointwise results are only computed again for the sums
            sums = {t.storage for c in calls if not _is_pointwise(c) for t in c.outputs}
            sums |= {t.storage for c in calls if size_of(c) < kernel.size for t in c.outputs}
            written = [t for t in written if t.storage in sums]
        if not written and kernel.nonreaders:
            return None
        return kernel_call(calls, tuple(read.values()), tuple(written) or calls[-1].outputs)


def _kernels(stretch: Sequence[int], uses: _Uses) -> list[_Kernel]:
    """Groups consecutive fusible calls into kernels, in the order that they run in."""
    kernels: list[_Kernel] = []
    kernel_of: dict[int, int] = {}  # storage -> number of the kernel that makes it
    for i in stretch:
        call = uses.calls[i]
        size, columns = size_of(call), is_over_columns(call)
        sources = {kernel_of[t.storage] for t in call.tensors() if t.storage in kernel_of}
        for_columns = list(_producers(call, stretch, uses)) if columns else []
        after_split = _recomputed_after_split(call, (kernels[n] for n in sources), stretch, uses)
        # It joins the last kernel that it can, none before one whose results it has to read.
        first = 0 if for_columns else max(sources, default=0)
        joined = (
            number
            for number in reversed(range(first, len(kernels)))
            if _joins(i, kernels[number], number in sources, stretch[-1], uses)
        )
        own = next(joined, len(kernels))
        if own == len(kernels):
            kernels.append(_Kernel(size=size, columns=columns))
        kernel = kernels[own]
        kernel.size = max(kernel.size, size)
        copied = [j for j in after_split if j not in kernel.members]
        kernel.members += [j for j in for_columns if j not in kernel.members] + [*copied, i]
        kernel.copies |= {t.storage for j in copied for t in uses.calls[j].outputs}
        read = {(j, t.storage) for j in (i, *copied) for t in uses.calls[j].tensors()}
        for number, other in enumerate(kernels):
            if number != own and for_columns:
                other.nonreaders = other.nonreaders | {i, *for_columns}
            if number != own:
                other.unread |= {pair for pair in read if pair[1] in kernel.copies}
        kernel_of |= {t.storage: own for t in call.outputs}
    return kernels


def _joins(i: int, kernel: _Kernel, reads: bool, last: int, uses: _Uses) -> bool:
    """Whether call i joins a kernel; ``reads``: it reads a result of the kernel.

    ``last``: the last call that may be fused with it.
    """
    call = uses.calls[i]
    size, columns = size_of(call), is_over_columns(call)
    makers = _makers(call, kernel, uses) if reads else []
    if _is_load(call) and not all(map(_is_pointwise, makers)):
        return False  # it would read what other threads compute
    if any(_is_split(maker, kernel, size) for maker in makers):
        return False
    if kernel.columns:
        return size == kernel.size if columns else reads and size < kernel.size
    if columns:
        return False
    if size > kernel.size:
        return reads and all(_is_pointwise(uses.calls[j]) for j in kernel.members)
    if size == kernel.size or reads:
        return True
    return uses.leads_to(i, kernel.size, last)


def _is_split(call: OpCall, kernel: _Kernel, size: int) -> bool:
    """Whether ``call`` is a reduction that several blocks of a kernel share.

    It leaves few numbers, each of many, to a reader that goes over ``size`` elements: the reader
    then is another kernel. Source: ``inner_reduction_splits`` in torch/_inductor/choices.py.
    """
    results = call.outputs[0].numel
    return bool(results < min(size, FEW_RESULTS) and kernel.size > LONG_REDUCTION * results)


def _makers(call: OpCall, kernel: _Kernel, uses: _Uses) -> list[OpCall]:
    """The calls of a kernel that compute the inputs of ``call``."""
    read = {t.storage for t in call.tensors()}
    members = (uses.calls[i] for i in kernel.members)
    return [member for member in members if read & {t.storage for t in member.outputs}]


def _recomputed_after_split(
    call: OpCall, sources: Iterable[_Kernel], stretch: Sequence[int], uses: _Uses
) -> list[int]:
    """Pointwise calls computed again by ``call``, which reads a split reduction of ``sources``.

    They go over as many elements, and read MOST_READ tensors at most; else there are none.
    """
    size = size_of(call)
    if is_over_columns(call):
        return []
    pairs = ((maker, kernel) for kernel in sources for maker in _makers(call, kernel, uses))
    if not any(_is_split(maker, kernel, size) for maker, kernel in pairs):
        return []
    producers = [j for j in _producers(call, stretch, uses) if size_of(uses.calls[j]) == size]
    made = {t.storage for j in producers for t in uses.calls[j].outputs}
    read = {t.storage for j in producers for t in uses.calls[j].tensors()} - made
    return producers if len(read) <= MOST_READ else []


def _producers(call: OpCall, stretch: Sequence[int], uses: _Uses) -> Iterator[int]:
    """Pointwise calls of a stretch from which ``call`` can compute its inputs again, in order."""
    producers = set[int]()
    todo = list(call.tensors())
    while todo:
        t = todo.pop()
        i = uses.maker(t.storage)
        if i is None or i in producers or i < stretch[0] or not _is_pointwise(uses.calls[i]):
            continue
        if uses.last_reader(t.storage, call) <= stretch[-1]:
            producers.add(i)
            todo += uses.calls[i].tensors()
    yield from sorted(producers)
