"""Which part of a tensor a tensor-parallel rank holds, followed through views and ops by strides.

A cut names a range of steps in memory: the elements i with start <= stride of their dimension < end
belong to the dimension that is cut, whatever views of it are called. Columns of a (tokens, width)
matrix are [1, width); a view of them as heads is cut along the heads, their largest dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from itercast.capture.opcall import OpCall, TensorSpec

# Ops whose result has another length along a dimension that may be the one that is cut.
OTHER_LENGTH = ("cat", "index", "gather", "scatter", "slice_", "constant_pad", "repeat", "sdpa")
NEW_DIM = {"aten.stack.default": 1, "aten.select_backward.default": 2}  # argument that names it
TABLE_GRADIENT = "aten.embedding_dense_backward.default"
# Ops whose other inputs are indices, or not as long as the result.
UNALIGNED = ("index", "gather", "scatter", "embedding", "cat", "native_layer_norm", "nll_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A storage of which a rank holds a part; ``tokens``: cut by tokens, else by columns."""

    start: int
    end: int
    tokens: bool = False

    def dims(self, t: TensorSpec) -> list[tuple[int, int]]:
        """Pairs (dimension of ``t`` inside the cut, its length within it), outermost first."""
        inside = []
        for dim, (length, stride) in enumerate(zip(t.shape, strides(t), strict=True)):
            if length > 1 and 0 < stride < self.end:
                low, high = self._range(length, stride)
                if high > low:
                    inside.append((stride, dim, high // low))
        return [(dim, length) for _, dim, length in sorted(inside, reverse=True)]

    def moved(self, t: TensorSpec, dim: int, out: TensorSpec, out_dim: int) -> Cut:
        """The same cut of ``out``, whose dimension ``out_dim`` is dimension ``dim`` of ``t``."""
        low, high = self._range(t.shape[dim], strides(t)[dim])
        stride, length = strides(out)[out_dim], out.shape[out_dim]
        if length != t.shape[dim]:
            low, high = 1, length
        return Cut(start=stride * low, end=stride * high, tokens=self.tokens)

    def _range(self, length: int, stride: int) -> tuple[int, int]:
        """Start and end of the cut in steps of a dimension of this length and stride."""
        stride = max(1, stride)
        return max(1, self.start // stride), min(length, self.end // stride)


def cut_along(t: TensorSpec, dim: int, *, length: int = 0, tokens: bool = False) -> Cut:
    """The cut of a tensor along ``dim``: of the whole, or of its innermost ``length`` elements."""
    stride = strides(t)[dim]
    return Cut(start=stride, end=stride * (length or t.shape[dim]), tokens=tokens)


def strides(t: TensorSpec) -> tuple[int, ...]:
    """The tensor's strides; those of a contiguous one where they are not known."""
    return t.stride or contiguous(t.shape)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(reversed(list(accumulate(reversed(shape[1:]), mul, initial=1)))) if shape else ()


def result_dim(call: OpCall, t: TensorSpec, dim: int, out: TensorSpec) -> int | None:
    """Finds the dimension of an op's result that corresponds to dimension ``dim`` of an input.

    None where the op sums over it, or takes one element of it.
    """
    name, length = call.op.split(".")[1], t.shape[dim]
    if out.numel <= 1:
        return None
    if call.op == TABLE_GRADIENT:
        return len(out.shape) - 1 if dim == len(t.shape) - 1 else None
    if len(out.shape) == len(t.shape):
        changes_length = out.shape[dim] > 1 and name.startswith(OTHER_LENGTH)
        return dim if out.shape[dim] == length or changes_length else None
    if call.op in NEW_DIM:
        stated_dim = (*call.args, 0)[NEW_DIM[call.op]]  # 0 by default
        new_dim = int(stated_dim) % len(out.shape)
        return dim + 1 if new_dim <= dim else dim
    summed = _summed(call, t)
    if summed is not None:
        return None if dim in summed else dim - sum(d < dim for d in summed)
    added_dims = len(out.shape) - len(t.shape)  # found by length: counted from the last or first
    likely = (dim + added_dims, dim) if added_dims > 0 else (dim, dim + added_dims)
    return next((d for d in likely if 0 <= d < len(out.shape) and out.shape[d] == length), None)


def _summed(call: OpCall, t: TensorSpec) -> set[int] | None:
    """The dimensions that a reduction removes; None for ops that name none."""
    dims = call.args[1] if len(call.args) > 1 else None
    listed = isinstance(dims, tuple) and all(isinstance(d, int) for d in dims)
    return {d % len(t.shape) for d in dims} if dims and listed else None


def aligned_dim(call: OpCall, t: TensorSpec, out: TensorSpec, out_dim: int) -> int | None:
    """The dimension of an uncut input that matches the result's cut one; None where none does.

    It is as long, and at the same place counted from the last one, as in broadcasting. A rank reads
    its part of such an input.
    """
    dim = out_dim - (len(out.shape) - len(t.shape))
    if call.op.split(".")[1].startswith(UNALIGNED) or not 0 <= dim < len(t.shape):
        return None
    return dim if t.shape[dim] == out.shape[out_dim] > 1 else None


def first_dim(dims: Iterable[tuple[int, int]], parts: int, flexible: bool) -> int | None:
    """Chooses the dimension to cut: the outermost; if ``flexible``, one that ``parts`` divides.

    ``dims``: pairs (dimension, length) as ``Cut.dims`` returns them; None where there are none.
    """
    pairs = list(dims)
    if flexible:
        pairs.sort(key=lambda pair: (pair[1] % parts != 0, pair[1] < parts))
    return pairs[0][0] if pairs else None
