"""Sparse tensors in a capture: known layouts, fake copies, and the results of ops on them.

A fake sparse tensor keeps the number of values that the real one stores (nnz); its indices and
values are fake tensors of these lengths. Ops whose nnz depends on data follow a convention: the
entries of one tensor are all at different positions, those of two tensors that are added are at
different positions unless both share their indices, and elementwise ops keep the pattern of their
first sparse operand. A conversion of a dense tensor, or a product of two sparse ones, cannot be
captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    in_kernel_invocation_manager,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from itercast.capture.opcall import Args, Argument, Kwargs

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
SPARSE = (torch.sparse_coo, *COMPRESSED)
NAMES = {torch.sparse_coo: "coo", torch.sparse_csr: "csr", torch.sparse_csc: "csc"}
ACCEPTED = (torch.strided, torch.sparse_coo, torch.sparse_csr)  # of parameters and inputs


def is_sparse(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor in one of torch's sparse layouts."""
    if not isinstance(value, torch.Tensor) or value.layout is torch.strided:
        return False  # decided first, for speed: nearly all tensors are
    return value.layout in SPARSE


def is_row_sparse(value: object) -> TypeGuard[Tensor]:
    """Whether this is a COO tensor of whole rows, as gradients of sparse embedding tables are."""
    return is_sparse(value) and value.layout == torch.sparse_coo and value.dense_dim() > 0


def check_layouts(tensors: Iterable[tuple[str, object]]) -> None:
    """Raise ValueError for the first named tensor in a layout that a capture cannot start from."""
    for name, tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.layout not in ACCEPTED:
            raise unknown_layout(name, tensor.layout)


def unknown_layout(name: str, layout: torch.layout) -> ValueError:
    """The error for a tensor in a layout that captures do not describe, in one line."""
    text = str(layout).removeprefix("torch.")
    return ValueError(f"{name} has layout {text}: captures describe sparse_coo and sparse_csr only")


def layout_name(tensor: Tensor) -> str:
    """The layout as ``TensorSpec`` names it; ValueError for block layouts."""
    if tensor.layout not in NAMES:
        raise unknown_layout("a tensor of the step", tensor.layout)
    return NAMES[tensor.layout]


def values_of(tensor: Tensor) -> Tensor:
    """The stored values of a sparse tensor, any other tensor as it is."""
    return parts_of(tensor)[-1] if is_sparse(tensor) else tensor


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The index tensors and the values of a sparse tensor.

    COO: indices, values. CSR and CSC: pointers, indices, values.
    """
    with nullcontext() if isinstance(tensor, FakeTensor) else _disable_current_modes():
        if tensor.layout == torch.sparse_coo:
            return tensor._indices(), tensor._values()
        if tensor.layout == torch.sparse_csr:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        if tensor.layout == torch.sparse_csc:
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    raise unknown_layout("a tensor of the step", tensor.layout)


def _nnz(tensor: Tensor) -> int:
    """The number of values that a sparse tensor stores."""
    nnz: int = parts_of(tensor)[-1].shape[0]
    return nnz


def _is_coalesced(tensor: Tensor) -> bool:
    """Whether a COO tensor's entries are sorted and unique."""
    with nullcontext() if isinstance(tensor, FakeTensor) else _disable_current_modes():
        return bool(tensor.is_coalesced())


def fake_sparse(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A sparse tensor of the same form and nnz under the current fake mode."""
    return _like(tensor, dtype)


def as_row_ops(op: str, args: Args, outputs: Args) -> tuple[str, Args, Args]:
    """Rewrites ops on a sparse embedding gradient as dense ops on the rows that it holds.

    The gradient of a bag is copied to each of its lookups (``index_select``), and added to the
    table (``index_add_``). All other ops stay as they are.
    """
    if op == "aten._embedding_bag_backward.default" and is_row_sparse(outputs[0]):
        op, args = "aten.index_select.default", (args[0], 0, args[1])
    elif op == "aten.add_.Tensor" and is_row_sparse(args[1]) and not is_sparse(args[0]):
        indices, values = parts_of(args[1])
        op, args = "aten.index_add_.default", (args[0], 0, indices[0], values)
    elif op != "aten.clone.default" or not is_row_sparse(args[0]):
        return op, args, outputs
    return op, tuple(map(values_of, args)), tuple(map(values_of, outputs))


class FakeSparseOps(TorchDispatchMode):
    """Gives sparse fake tensors their nnz while a model and its inputs are made."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Argument:
        return run_with_sparse(func, args, kwargs or {})


def makes_or_takes_sparse(name: str, args: Args) -> bool:
    """Whether an op (named without ``aten::``) reads a sparse tensor or makes one of dense ones."""
    if name in MAKERS:
        return True
    return any(
        any(map(is_sparse, value)) if isinstance(value, list) else is_sparse(value)
        for value in args
    )


def run_with_sparse(func: OpOverload, args: Args, kwargs: Kwargs) -> Argument:
    """Compute the fake result of an op that reads or makes sparse tensors.

    How many values (nnz) a sparse result stores follows the convention in the module's docstring.
    """
    name = func._schema.name.removeprefix("aten::")
    if not makes_or_takes_sparse(name, args):
        return func(*args, **kwargs)
    if name in RULES:
        result = RULES[name](*args, **kwargs)
        if result is NotImplemented:
            raise DynamicOutputShapeException(func)
        if result is not None:
            return result
    first = next((a for a in args if is_sparse(a)), None)
    if func._schema.is_mutable and name.startswith("_foreach_"):
        return None  # in place, on lists
    if func._schema.is_mutable and first is args[0] and name != "_coalesced_":
        return first  # torch would empty it
    output = func(*args, **kwargs)
    if name in EMPTY or not is_sparse(output) or output._nnz():
        return output
    if first is None or (output.shape, output.layout) != (first.shape, first.layout):
        raise DynamicOutputShapeException(func)
    return _like(first, output.dtype)


def _coo(indices: Tensor, values: Tensor, size: Argument, coalesced: bool) -> Tensor:
    """A COO tensor of indices and values, which are not checked."""
    return torch.sparse_coo_tensor(
        indices, values, size, check_invariants=False, is_coalesced=coalesced
    )


def _compressed(parts: Sequence[Tensor], size: Sequence[int], layout: torch.layout) -> Tensor:
    """A fake CSR or CSC tensor of pointers, indices and values; torch cannot make it of fakes."""
    mode: Any = torch._guards.detect_fake_mode(parts)
    pointers, indices, values = (
        t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in parts
    )
    with in_kernel_invocation_manager(mode):  # parts stay in place, as those of a view do
        compressed = torch.sparse_compressed_tensor(
            pointers,
            indices,
            values,
            size=tuple(size),
            layout=layout,
            device="meta",
            check_invariants=False,
        )
    with _disable_current_modes():
        return FakeTensor(mode, compressed, torch.device("cpu"))


def _like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A sparse tensor with new values at the same positions."""
    *indices, values = parts_of(tensor)
    values = torch.empty(values.shape, dtype=dtype or tensor.dtype)
    if tensor.layout == torch.sparse_coo:
        return _coo(indices[0], values, tensor.shape, _is_coalesced(tensor))
    return _compressed((*indices, values), tensor.shape, tensor.layout)


def _transposed(tensor: Tensor, *dims: int) -> Argument:
    """The transpose of a sparse matrix: of CSR a CSC one with the same parts, and back.

    None where torch does it itself, as for dense tensors.
    """
    if not is_sparse(tensor) or tensor.dim() != 2 or is_row_sparse(tensor):
        return None
    if dims and dims[0] % 2 == dims[1] % 2:  # the same axis twice, one may be negative
        return tensor
    size, (*indices, values) = tuple(reversed(tensor.shape)), parts_of(tensor)
    if tensor.layout == torch.sparse_coo:
        return _coo(indices[0].flip(0), values, size, coalesced=False)
    csr = tensor.layout == torch.sparse_csr
    layout = torch.sparse_csc if csr else torch.sparse_csr
    return _compressed((*indices, values), size, layout)


def _product(a: Tensor, b: Tensor) -> Argument:
    """mm or mv with one sparse operand; the nnz of a product of two depends on data."""
    if is_sparse(a) and is_sparse(b):
        return NotImplemented
    return torch.empty((a.shape[0], *b.shape[1:]), dtype=a.dtype)


def _sum_of_product(c: Tensor, a: Tensor, b: Tensor, **options: object) -> Argument:
    """c + a @ b, dense; unknown where c is sparse."""
    return NotImplemented if is_sparse(c) else _product(a, b)


def _sum(a: Tensor, b: Tensor, **options: object) -> Argument:
    """a + b: dense if one of them is, else sparse with the entries of both.

    None where torch does it itself (b is a number); NotImplemented where nnz depends on data.
    """
    if not isinstance(b, torch.Tensor):
        return None
    if not (is_sparse(a) and is_sparse(b)):
        return torch.empty(a.shape, dtype=a.dtype)
    if a.layout != torch.sparse_coo or b.layout != torch.sparse_coo:
        return _like(a) if _nnz(a) == _nnz(b) else NotImplemented
    (first, values), (second, others) = parts_of(a), parts_of(b)
    coalesced = _is_coalesced(a) and _is_coalesced(b)
    if coalesced and first.untyped_storage()._cdata == second.untyped_storage()._cdata:
        return _like(a)
    indices, values = torch.cat((first, second), 1), torch.cat((values, others))
    return _coo(indices, values, a.shape, coalesced)


def _sum_in_place(tensor: Tensor, other: Tensor, **options: object) -> Argument:
    """A dense tensor += a sparse one, in which torch would add a dense tensor of zeros."""
    return tensor if is_sparse(other) and not is_sparse(tensor) else None


def _coalesced(tensor: Tensor) -> Tensor:
    """A COO tensor of sorted, unique entries: taken to be as many as before."""
    indices, values = parts_of(tensor)
    return _coo(indices, torch.empty_like(values), tensor.shape, coalesced=True)


def _to_csr(tensor: Tensor, dense_dim: int | None = None) -> Argument:
    """A sparse matrix as CSR, with as many values; for a dense one their number is unknown."""
    if not is_sparse(tensor) or tensor.dim() != 2 or is_row_sparse(tensor):
        return NotImplemented
    if tensor.layout == torch.sparse_csr:
        return _like(tensor)
    pointers = torch.empty(tensor.shape[0] + 1, dtype=torch.int64)
    indices = torch.empty(_nnz(tensor), dtype=torch.int64)
    values = torch.empty(_nnz(tensor), dtype=tensor.dtype)
    return _compressed((pointers, indices, values), tensor.shape, torch.sparse_csr)


def _to_sparse(
    tensor: Tensor,
    *rest: object,
    layout: torch.layout | None = torch.sparse_coo,
    **options: object,
) -> Argument:
    """A sparse tensor as COO or CSR, with its nnz; not of a dense one, whose nnz is not known."""
    if not is_sparse(tensor) or layout not in (None, torch.sparse_coo, torch.sparse_csr):
        return NotImplemented
    if layout == torch.sparse_csr:
        return _to_csr(tensor)
    indices = torch.empty((tensor.dim(), _nnz(tensor)), dtype=torch.int64)
    values = torch.empty(_nnz(tensor), dtype=tensor.dtype)
    return _coo(indices, values, tensor.shape, coalesced=True)


def _from_parts(
    pointers: Tensor, indices: Tensor, values: Tensor, *size: Sequence[int], **options: Argument
) -> Argument:
    """A CSR or CSC tensor of its parts; its size has to be given."""
    if not size:
        return NotImplemented  # the number of columns is that of the largest index
    layout = options["layout"]
    if layout not in NAMES:
        raise unknown_layout("a tensor of the step", layout)
    return _compressed((pointers, indices, values), size[0], layout)


def _bag_gradient(grad: Tensor, index: Tensor, *facts: Argument) -> Argument:
    """The gradient of a sparse embedding table: one row per lookup; torch returns None for it."""
    _offsets, _bag_of, _sizes, _largest, rows, _by_frequency, _mode, sparse, *_ = facts
    if not sparse:
        return None
    values = grad.new_empty((index.numel(), grad.shape[-1]))
    return _coo(index.view(1, -1), values, (rows, grad.shape[-1]), coalesced=False)


MAKERS = frozenset(
    {
        *("_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc"),
        *("sparse_compressed_tensor", "_sparse_compressed_tensor_unsafe"),
        "_embedding_bag_backward",
    }
)
EMPTY = ("zeros_like", "empty_like")  # these store no value of a COO tensor
RULES: Mapping[str, Callable[..., Argument]] = {
    "mm": _product,
    "mv": _product,
    "addmm": _sum_of_product,
    "_sparse_addmm": _sum_of_product,
    "sparse_sampled_addmm": lambda pattern, a, b, **options: _like(pattern),
    "sparse_mask": lambda tensor, mask: _like(mask, tensor.dtype),
    "t": _transposed,
    "transpose": _transposed,
    "add": _sum,
    "add_": _sum_in_place,
    "clone": lambda tensor, **options: _like(tensor),
    "_coalesce": _coalesced,
    "_to_sparse": _to_sparse,
    "_to_sparse_csr": _to_csr,
    "sparse_compressed_tensor": _from_parts,
    "_sparse_compressed_tensor_unsafe": _from_parts,
    "_embedding_bag_backward": _bag_gradient,
}
