"""Lifetimes of the memory that a step allocates, and the optimizer's share of it.

A framework's own kernels save less for backward than a model's separate ops (``read_instead``):

- A copy in a wider dtype is not kept: backward casts again. So a norm in fp32 keeps its input and a
  number per row (transformer_engine/pytorch/module/rmsnorm.py), a router in fp32 its input in half
  precision (RouterGatingLinearFunction in megatron/core/transformer/moe/moe_utils.py).
- What a norm makes before its weight is made again of its input.
- Experts' results are weighted before their last product: what is weighted is that product's input,
  which is kept anyway (WeightedSwiGLUFunction in megatron/core/fusions/fused_bias_swiglu.py).
- A softmax in fp32 between half-precision tensors is kept in half precision
  (megatron/core/fusions/fused_softmax.py).
- Attention keeps contiguous values, not the wider result that also holds parts of the keys
  (megatron/core/transformer/multi_latent_attention.py).
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from itercast.capture.opcall import ITEMSIZE_BYTES, OpCall, StepCapture, TensorSpec
from itercast.compose.graph.attention_kernels import SDPA
from itercast.compose.graph.cross_entropy import over_logits
from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.graph.product_roles import DTYPE_CAST, EXPERT_PRODUCTS
from itercast.compose.graph.rewrite import COLLECTIVE

PRODUCT = "aten.mul.Tensor"
SOFTMAX = "aten._softmax.default"


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Lifetime of a storage: indices of its first call, last call in forward, last call; bytes."""

    first: int
    last_forward: int
    last: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryRise:
    """Bytes that a range of calls adds to memory: the most at a time, and what it leaves."""

    peak: int = 0
    left: int = 0


NO_RISE = MemoryRise()


class PhaseEdges(NamedTuple):
    """Indices of the first calls of forward, of backward, and of the optimizer."""

    forward: int
    backward: int
    optimizer: int


def lives_of(capture: StepCapture, edges: PhaseEdges) -> dict[int, Lifetime]:
    """Lifetimes of storages made in forward or backward, by storage; parameters are left out."""
    skip = {p.storage for p in capture.parameters} | {-1}
    first: dict[int, int] = {}
    forward: dict[int, int] = {}
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    allocated = set[int]()  # before the call that first writes them, which may write but a part
    for i in range(edges.forward, len(capture.calls)):
        call = capture.calls[i]
        for t in call.outputs if i < edges.optimizer else ():
            if (storage := t.storage) in skip:
                continue
            if first.setdefault(storage, i) == i and storage in {x.storage for x in call.tensors()}:
                allocated.add(storage)
            if size.get(storage, 0) < t.nbytes:
                size[storage] = t.nbytes
        for t in call.touched:
            if (storage := t.storage) in first:
                last[storage] = i
                if i < edges.backward:
                    forward[storage] = i
                if storage in allocated:
                    size[storage] = max(size.get(storage, 0), _own_bytes(t))
    return {s: Lifetime(at, forward.get(s, -1), last[s], size.get(s, 0)) for s, at in first.items()}


def held_lives(
    capture: StepCapture,
    lives: Mapping[int, Lifetime],
    ends: Mapping[int, int],
    instead: Mapping[int, TensorSpec],
) -> list[Lifetime]:
    """Lifetimes where call ``ends[i]`` frees what call i reads last; ``lives`` as of ``lives_of``.

    ``instead``: see ``_held``.
    """
    skip = {p.storage for p in capture.parameters} | {-1}
    later = {s: replace(v, last=ends[v.last]) if v.last in ends else v for s, v in lives.items()}
    return list(_held(later, instead, skip))


def _own_bytes(t: TensorSpec) -> int:
    """Bytes of memory from a tensor's first to its last element; an expanded tensor has few."""
    if not t.stride or not t.numel:
        return t.nbytes
    numel = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride, strict=True))
    return min(t.nbytes, numel * t.nbytes // t.numel)


def _held(
    lives: Mapping[int, Lifetime], instead: Mapping[int, TensorSpec], skip: Container[int]
) -> Iterator[Lifetime]:
    """Lifetimes by storage, where backward holds the tensors ``instead`` in place of some results.

    A tensor in the same storage, or that no call makes, is a copy from the last use in forward on.
    """
    longer = dict(lives)
    for storage, kept in instead.items():
        life = lives.get(storage)
        if life is None or life.last == life.last_forward:
            continue
        longer[storage] = replace(longer[storage], last=life.last_forward)
        other = longer.get(kept.storage) if kept.storage != storage else None
        if other:
            longer[kept.storage] = replace(other, last=max(other.last, life.last))
        elif kept.storage not in skip:
            yield Lifetime(life.last_forward, -1, life.last, kept.nbytes)
    yield from longer.values()


def read_instead(capture: StepCapture) -> Mapping[int, TensorSpec]:
    """The tensor that backward reads in place of a result of forward, by the result's storage.

    If both have the same storage, the tensor is a part of the result, and only that part is kept.
    """
    apart = over_logits(capture)
    forward = [c for c in capture.calls if c.phase == "forward" and not apart(c)]
    in_place = (c for c in capture.calls if c.op.split(".")[1].endswith("_"))
    changed = {t.storage for c in in_place for t in c.outputs}
    makers: dict[int, OpCall] = {}
    for call in forward:
        for t in call.outputs:
            if t.storage not in changed:
                makers.setdefault(t.storage, call)
    instead: dict[int, TensorSpec] = {}
    for call in forward:
        for storage, kept in _kept_instead(call, makers, instead):
            if storage in makers:
                instead[storage] = kept
    return instead


def _kept_instead(
    call: OpCall, makers: Mapping[int, OpCall], instead: Mapping[int, TensorSpec]
) -> Iterator[tuple[int, TensorSpec]]:
    """Pairs (storage of a result, tensor kept in its place) that follow from a forward call.

    The module's docstring has the rules. ``makers``: the call that makes each storage; ``instead``:
    pairs found so far.
    """
    if call.op == DTYPE_CAST:
        source, copy = call.args[0], call.outputs[0]
        maker = makers.get(source.storage)
        scaled = _scaled(maker)
        if ITEMSIZE_BYTES[copy.dtype] > ITEMSIZE_BYTES[source.dtype]:
            yield copy.storage, source  # backward casts to the wider dtype again
        elif maker and maker.op == SOFTMAX:
            yield source.storage, copy  # a softmax in fp32 is kept in half precision
        elif scaled and scaled.storage in instead:
            yield copy.storage, instead[scaled.storage]  # a norm in fp32, cast before its weight
    elif weighted := _scaled(call):  # experts' results, weighted before their last product
        maker = makers.get(weighted.storage)
        if maker and maker.op == COLLECTIVE:  # experts of other ranks
            maker = makers.get(maker.args[0].storage)
        if maker and maker.op in EXPERT_PRODUCTS:
            yield weighted.storage, maker.args[0]
    elif call.op == PRODUCT and (normed := _weighted(call)):  # a norm's weight
        if source := _scaled(makers.get(normed.storage)):
            yield normed.storage, instead.get(source.storage, source)
    elif call.op == SDPA:  # values that are a part of a wider result
        query, key, value = call.args[:3]
        maker = makers.get(value.storage)
        part = maker and maker.outputs[0].nbytes > value.nbytes
        if part and value.storage not in (query.storage, key.storage):
            yield value.storage, value


def _scaled(call: OpCall | None) -> TensorSpec | None:
    """The tensor whose rows a call multiplies by a number each; None for other calls."""
    tensors = call.tensors() if call and call.op == PRODUCT else ()
    if len(tensors) != 2:
        return None
    largest, numbers = sorted(tensors, key=lambda t: -t.numel)
    is_column = numbers.shape[-1:] == (1,) and largest.shape[-1:] != (1,)
    return largest if is_column and numbers.numel * largest.shape[-1] == largest.numel else None


def _weighted(call: OpCall) -> TensorSpec | None:
    """The tensor whose columns a product multiplies by a weight each; None for other products."""
    whole = max(call.tensors(), key=lambda t: t.numel)
    columns = {t.shape for t in call.tensors()} == {whole.shape, whole.shape[-1:]}
    return whole if columns and len(whole.shape) > 1 else None


def last_uses(calls: Sequence[OpCall]) -> dict[int, int]:
    """Index of the last call that reads or writes a storage."""
    used = ((t, i) for i, call in enumerate(calls) for t in call.touched)
    return {t.storage: i for t, i in used}


@cached_by_identity
def lifetimes(capture: StepCapture) -> list[tuple[int, int, int]]:
    """Returns (first call, last call, bytes) of every temporary storage and activation.

    Left out: parameters, their gradients and the optimizer's state.
    """
    parameters = {p.storage for p in capture.parameters}
    size: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    state: set[int] = set()
    for i, call in enumerate(capture.calls):
        inputs = call.tensors()
        for t in (*inputs, *call.outputs):
            if t.storage < 0 or t.storage in parameters:
                continue
            first.setdefault(t.storage, i)
            last[t.storage] = i
            size[t.storage] = max(size.get(t.storage, 0), t.nbytes)
        if call.phase in ("optimizer", "zero_grad"):
            state |= {t.storage for t in inputs if first.get(t.storage) == i}
    phases = [call.phase for call in capture.calls]
    return [
        (start, last[s], size[s])
        for s, start in first.items()
        if s not in state and (phases[start], phases[last[s]]) != ("backward", "optimizer")
    ]


def input_bytes(capture: StepCapture) -> int:
    """Returns the bytes that forward reads and no call makes, but parameters: inputs, buffers.

    A collective's message may be its own result: what is gathered is no input.
    """
    not_inputs = {p.storage for p in capture.parameters} | {-1}
    nbytes_of: dict[int, int] = {}
    for call in capture.calls:
        if call.phase in ("forward", "loss"):
            own = {t.storage for t in call.outputs} if call.op == COLLECTIVE else set[int]()
            new = [t for t in call.tensors() if t.storage not in not_inputs | own]
            nbytes_of |= {t.storage: max(t.nbytes, nbytes_of.get(t.storage, 0)) for t in new}
        not_inputs |= {t.storage for t in call.outputs}
    return sum(nbytes_of.values())


def bytes_for_loss(capture: StepCapture) -> int:
    """Returns the bytes of forward's results that the loss reads, and backward does not."""
    made: dict[int, int] = {}
    read: dict[str, set[int]] = {"loss": set(), "backward": set()}
    for call in capture.calls:
        if call.phase == "forward":
            made |= {t.storage: t.nbytes for t in call.outputs}
        elif call.phase in read:
            read[call.phase] |= {t.storage for t in call.tensors()}
    return sum(made.get(storage, 0) for storage in read["loss"] - read["backward"])


def update_bytes(capture: StepCapture, calls: Container[int]) -> int:
    """Returns the peak bytes of temporaries of these calls of the optimizer, without its state."""
    return most_bytes(span for span in lifetimes(capture) if span[0] in calls)


def most_bytes(spans: Iterable[tuple[int, int, int]]) -> int:
    """Returns the most bytes that are alive at once, from (first, last, bytes)."""
    return memory_rise((0, sys.maxsize), spans).peak


def memory_rise(calls: tuple[int, int], spans: Iterable[tuple[int, int, int]]) -> MemoryRise:
    """What storages of (first call, last call, bytes) add to memory in a range of calls."""
    change: dict[int, int] = {}
    for first, last, nbytes in spans:
        if calls[0] <= first < calls[1]:
            change[first] = change.get(first, 0) + nbytes
        if calls[0] <= last < calls[1]:
            change[last + 1] = change.get(last + 1, 0) - nbytes
    levels = list(accumulate((change[i] for i in sorted(change)), initial=0))
    return MemoryRise(max(levels), levels[-1])


def node_ends(calls: Sequence[OpCall], backward: tuple[int, int]) -> dict[int, int]:
    """For each call of backward before the end of its autograd node, the node's last call.

    Both by index. Until then the node holds all that it has saved. Calls in a row that read one
    gradient are of one node. ``backward``: the half-open range of a layer's calls.
    """
    ends: dict[int, int] = {}
    written = {t.storage for c in calls[slice(*backward)] for t in c.outputs}
    read_by_next: set[int] = set()
    for i in range(backward[1] - 1, backward[0] - 1, -1):
        read = written & {t.storage for t in calls[i].tensors()}
        if read & read_by_next:
            ends[i] = ends.get(i + 1, i + 1)
        read_by_next = read
    return ends


def crossing_bytes(spans: Sequence[tuple[int, int, int]], length: int) -> list[int]:
    """Returns the bytes alive across the cut before each call, from (first, last, bytes)."""
    change = [0] * (length + 2)
    for first, last, nbytes in spans:
        change[first + 1] += nbytes
        change[last + 1] -= nbytes
    return list(accumulate(change))
