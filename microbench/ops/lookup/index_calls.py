"""Calls of indexing and copying ops, read into ``IndexOp``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import OpCall, TensorSpec
from itercast.microbench.ops.calls import answers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOp:
    """One call that picks or places ``size`` of ``source`` slots, outer x size x inner elements.

    A slot is an index of the indexed axis, with all elements there. ``source`` is the length of
    that axis on the other side (the table of a gather, the target of a scatter, the padded row, the
    result of a slice's backward, a mask); ``tensors`` are joined by cat; ``k`` is topk's count or
    unfold's window.
    """

    op: str
    outer: int
    size: int
    inner: int = 1
    source: int = 1
    tensors: int = 1
    k: int = 1
    dtype: str = "fp32"


FACTS = facts_of(__file__)


def _around(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """Elements before, along and after an axis."""
    if not shape:
        return 1, 1, 1
    dim %= len(shape)
    return prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])


def _name(call: OpCall) -> str:
    """The op's name, or that of another op that runs the same kernels."""
    op = call.op.split(".")[1]
    return str(FACTS["same_as"].get(op, op))


def _index_op(call: OpCall, dtype: str, **sizes: int) -> IndexOp | None:
    """The call's parameters; None where there is nothing to move."""
    if min(sizes.values()) < 1:
        return None
    return IndexOp(op=_name(call), dtype=dtype, **sizes)


def from_index_on_axis(call: OpCall) -> IndexOp | None:
    """Describe gather(x, dim, index), scatter*(x, dim, index, src), index_select(x, dim, index)...

    The index of index_select and index_add is 1-d and picks whole slices; that of gather and
    scatter has an entry per element.
    """
    x, dim, index = call.args[:3]
    outer, source, inner = _around(x.shape, dim)
    size = index.numel
    if _name(call).startswith(("gather", "scatter")):
        outer, size, inner = _around(index.shape, dim)
    return _index_op(call, x.dtype, outer=outer, size=size, inner=inner, source=source)


def from_index(call: OpCall) -> IndexOp | None:
    """Describe index(x, (None, i, j)) or index_put(x, (i, j), values, accumulate).

    None for a boolean index, whose size depends on data.
    """
    x, indices = call.args[:2]
    places = [d for d, i in enumerate(indices) if i is not None]
    if not places or any(indices[d].dtype == "bool" for d in places):
        return None
    first, last = places[0], places[-1]
    outer, inner = prod(x.shape[:first]), prod(x.shape[last + 1 :])
    size = prod(_broadcast([indices[d].shape for d in places]))
    source = prod(x.shape[first : last + 1])
    params = _index_op(call, x.dtype, outer=outer, size=size, inner=inner, source=source)
    if params is None or not params.op.startswith("index_put") or not call.argument(3, "", False):
        return params
    return replace(params, op=f"{params.op.rstrip('_')}_accumulate{'_' * params.op.endswith('_')}")


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that these shapes are broadcast to."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def from_join(call: OpCall) -> IndexOp | None:
    """Describe cat(tensors, dim=0) or stack(tensors, dim=0), which adds an axis."""
    tensors: tuple[TensorSpec, ...] = tuple(t for t in call.args[0] if t.numel)
    if not tensors:
        return None
    dim, shape = call.argument(1, "dim", 0), tensors[0].shape
    if _name(call) == "stack":
        dim %= len(shape) + 1
        shape = (*shape[:dim], 1, *shape[dim:])
    outer, _, inner = _around(shape, dim)
    size = sum(t.numel for t in tensors) // (outer * inner)
    facts = {"outer": outer, "size": size, "inner": inner, "source": size, "tensors": len(tensors)}
    return _index_op(call, tensors[0].dtype, **facts)


def from_split(call: OpCall) -> IndexOp | None:
    """Describe split_with_sizes_copy(x, sizes, dim=0) and the like; ``tensors``: its outputs."""
    position = 1 if call.op.split(".")[1] == "unbind_copy" else 2
    return _whole_axis(call, call.argument(position, "dim", 0), tensors=len(call.outputs))


def _whole_axis(call: OpCall, dim: int, **more: int) -> IndexOp | None:
    """Describe a call that moves all slots of axis ``dim`` of its first argument."""
    x = call.args[0]
    outer, size, inner = _around(x.shape, dim)
    return _index_op(call, x.dtype, outer=outer, size=size, inner=inner, source=size, **more)


def from_part_backward(call: OpCall) -> IndexOp | None:
    """Describe slice_backward(grad, sizes, dim, ...) or select_backward, called likewise."""
    grad, shape, dim = call.args[:3]
    return _part_of_axis(call, shape, dim, grad)


def from_part_scatter(call: OpCall) -> IndexOp | None:
    """Describe slice_scatter(x, part, dim=0, ...) or select_scatter(x, part, dim, index)."""
    x, part = call.args[:2]
    return _part_of_axis(call, x.shape, call.argument(2, "dim", 0), part)


def from_narrow(call: OpCall) -> IndexOp | None:
    """Describe narrow_copy(x, dim, start, length) or slice_copy(x, dim=0, ...): copy a part."""
    return _part_of_axis(call, call.args[0].shape, call.argument(1, "dim", 0), call.outputs[0])


def _part_of_axis(call: OpCall, shape: Sequence[int], dim: int, part: TensorSpec) -> IndexOp | None:
    """Describe a call that moves ``part`` of a tensor of this shape: some slots of axis ``dim``.

    None where the tensor has no elements.
    """
    outer, source, inner = _around(tuple(shape), dim)
    if min(outer, inner) < 1:
        return None
    size = part.numel // (outer * inner)
    return _index_op(call, part.dtype, outer=outer, size=size, inner=inner, source=source)


def from_pad(call: OpCall) -> IndexOp | None:
    """Describe constant_pad_nd(x, (left, right, top, ...), value) as padding of one axis.

    Of several padded axes the last one counts.
    """
    x, pad = call.args[:2]
    axes = [i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    outer, size, inner = _around(x.shape, -1 - (axes[0] if axes else 0))
    if min(outer, inner) < 1:
        return None
    source = round(call.outputs[0].numel / (outer * inner))
    return _index_op(call, x.dtype, outer=outer, size=size, inner=inner, source=source)


def from_reorder(call: OpCall) -> IndexOp | None:
    """Describe flip(x, dims) or roll(x, shifts, dims) as a move along the last axis of ``dims``.

    A roll without dims moves along the flattened tensor.
    """
    x = call.args[0]
    dims = call.argument(*((1, "dims") if _name(call) == "flip" else (2, "")), ())
    if not dims:
        return _index_op(call, x.dtype, outer=1, size=x.numel, inner=1, source=x.numel)
    rank = max(1, len(x.shape))
    return _whole_axis(call, max(d % rank for d in dims))


def from_repeat(call: OpCall) -> IndexOp | None:
    """Describe repeat(x, times) or expand_copy(x, sizes) as ``size`` copies of runs of elements.

    A run has ``inner`` elements, x has ``outer`` runs.
    """
    x, out = call.args[0], call.outputs[0]
    if x.numel == 0 or out.numel == 0:
        return None
    shape = (1,) * (len(out.shape) - len(x.shape)) + x.shape
    grown = [d for d, (a, b) in enumerate(zip(shape, out.shape, strict=True)) if a != b]
    inner = prod(shape[grown[-1] :]) if grown else x.numel
    return _index_op(call, x.dtype, outer=x.numel // inner, size=out.numel // x.numel, inner=inner)


def from_triangle(call: OpCall) -> IndexOp | None:
    """Describe tril(x, diagonal) or triu(x, diagonal) of ``outer`` matrices of size x inner.

    The diagonal's offset is ignored.
    """
    return _whole_axis(call, -2)


def from_order(call: OpCall) -> IndexOp | None:
    """Describe sort(x, dim=-1), sort.stable(x, stable=, dim=) or topk(x, k, dim=-1)."""
    top = _name(call) == "topk"
    position = 2 if top or call.op.endswith("stable") else 1
    return _whole_axis(call, call.argument(position, "dim", -1), k=call.args[1] if top else 1)


def from_unfold(call: OpCall) -> IndexOp | None:
    """Describe unfold_backward(grad, sizes, dim, window, step): sums overlapping windows.

    ``size`` windows of ``k`` elements each; ``source``: elements of the axis that they cover.
    """
    grad, shape, dim, window, step = call.args[:5]
    outer, length, inner = _around(tuple(shape), dim)
    size = (length - window) // step + 1
    source = (size - 1) * step + window
    return _index_op(call, grad.dtype, outer=outer, size=size, inner=inner, source=source, k=window)


def from_nonzero(call: OpCall) -> IndexOp | None:
    """Describe nonzero(mask): ``size`` of ``source`` elements are chosen."""
    mask, positions = call.args[0], call.outputs[0]
    if mask.numel < 1:
        return None
    chosen = min(mask.numel, max(1, positions.shape[0]))
    return _index_op(call, mask.dtype, outer=1, size=chosen, source=mask.numel)


ANSWERS = answers_of(
    FACTS["answers"],
    *(from_index_on_axis, from_index, from_join, from_split, from_part_backward),
    *(from_part_scatter, from_narrow, from_pad, from_reorder, from_repeat, from_triangle),
    *(from_order, from_unfold, from_nonzero),
)
