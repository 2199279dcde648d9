"""Describes a captured step: op calls, the tensors they touch, and the model's parameters.

Ops have the names under which torch dispatches them below autograd: ``aten.mm.default``. A call on
sparse tensors keeps its name, and its tensors say their ``layout``:

    aten.mm.default, aten.mv.default       sparse @ dense, also from a backward (see ``csc`` below)
    aten._sparse_addmm.default             torch.sparse.mm and torch.sparse.addmm: (dense to add,
                                           sparse, dense); ``beta`` 0 where nothing is added
    aten.sparse_sampled_addmm.default      (pattern, dense, dense); with ``beta`` 1 it is also the
                                           gradient of the values of a CSR matrix in a product
    aten.sparse_mask.default               dense or sparse values at the pattern of another; after
                                           a dense ``mm`` the gradient of the values of a COO matrix
    aten._coalesce.default, aten._to_sparse_csr.default, aten._to_sparse.default,
    aten._to_dense.default, aten.mul.Tensor, aten.clone.default, ...

The gradient of an embedding table with ``sparse=True`` is different: it holds whole rows, and its
ops are recorded as dense ops on these rows: ``index_select``, ``index_add_``, ``clone``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, TypeVar

from itercast.capture.base.slow_imports import torch

NUMBERED = re.compile(r"((?:[^.\d][^.]*\.)*\d+(?:\.\d+)*)\.")
R = TypeVar("R", "TensorSpec", "OpCall")
Argument = Any  # of a call, or a result: tensor, number, flag, text, or a list of such
Args = tuple[Argument, ...]
Kwargs = dict[str, Argument]
Places = tuple[tuple[str, int], ...]  # calls by name, and how many of that name come before
ITEMSIZE_BYTES: Mapping[str, int] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
TORCH_NAMES: Mapping[str, str] = {  # where they differ; tf32 is stored as fp32
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
}
ALSO_IN_TORCH = {  # dtypes of torch that are logged as another one of their size
    **dict.fromkeys(("float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), "fp8"),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), "uint8"),  # scales, and packed pairs
    "uint16": "int16",
    "uint32": "int32",
    "uint64": "int64",
}
CELLS = {"lstm": 4, "gru": 3, "rnn": 1}  # gates: rows of weights for each element of the state
GATES = {**CELLS, **{f"{cell}_backward": n for cell, n in CELLS.items()}}
# Blocks of 16 numbers share a scale of 8 bits (a matrix one of 32 more), or blocks of 32.
# Source: https://arxiv.org/abs/2509.25149, https://arxiv.org/abs/2310.10537
BLOCK_SCALED: Mapping[str, float] = {"nvfp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32}
ELEMENT_BYTES: Mapping[str, float] = {**ITEMSIZE_BYTES, **BLOCK_SCALED}
NARROW = ("fp8", *BLOCK_SCALED)  # of products alone
# Products by integers of 8 or 4 bits, which nobody's rows have, and what is said of them.
BY_INTEGERS = tuple(
    f"aten.{op}.default" for op in ("_int_mm", "_weight_int8pack_mm", "_weight_int4pack_mm")
)
AS_IN_16_BITS = "products by integers of 8 or 4 bits take the time of 16 bits, which has rows"


PADDABLE = "paddable"  # fact of a product whose operands torch.compile pads where that is faster
COMPLEX = "complex"  # fact of a call on complex numbers, which are logged as pairs of real ones
INDEX_BYTES = 8  # of one index of a sparse tensor: int64


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype name; tf32 is stored as fp32."""
    dtype: torch.dtype = getattr(torch, TORCH_NAMES.get(name, name))
    return dtype


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape, dtype and place in memory of a tensor that an op reads or writes.

    ``storage`` is a number for the memory behind it: tensors that share memory share it (-1:
    unknown). ``zero_frac`` is the share of elements known to be zero; only the inputs of Adam's
    square roots have it (``capture.zeros``). ``layout`` is empty for strided tensors, ``coo`` or
    ``csr`` for sparse ones, and ``csc`` for the transpose of a CSR tensor, which is a view. ``nnz``
    is the number of values a sparse tensor stores; it has no strides, and ``shape`` is that of the
    whole matrix.
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] = ()
    storage: int = -1
    zero_frac: float = 0.0
    layout: str = ""
    nnz: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.stride, self.storage))  # alike in every process: no text

    @cached_property
    def numel(self) -> int:
        """Number of elements in memory; for a sparse tensor, of its stored values."""
        return self.nnz if self.layout else prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of these elements, and of the indices of a sparse tensor."""
        return stored_bytes(self.shape, self.dtype, self.layout, self.nnz)

    @cached_property
    def contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps; true where strides are unknown."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=False):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


def stored_bytes(shape: tuple[int, ...], dtype: str, layout: str = "", nnz: int = 0) -> int:
    """Bytes of a tensor's elements; for a sparse tensor, of its values and int64 indices.

    Indices of COO: dims * nnz; of CSR: nnz + rows + 1 for each matrix; of CSC: nnz + columns + 1.
    """
    if not layout:
        return round(prod(shape) * ELEMENT_BYTES[dtype])
    indices = len(shape) * nnz
    if layout != "coo":
        indices = nnz + prod(shape[:-2]) * (shape[-2 if layout == "csr" else -1] + 1)
    return nnz * ITEMSIZE_BYTES[dtype] + indices * INDEX_BYTES


@dataclass(frozen=True, kw_only=True)
class OpCall:
    """One call of one op in a step.

    ``args`` holds tensors (TensorSpec), scalars, strings, None and tuples of them, in the order of
    the op's schema. ``phase`` is zero_grad, forward, loss, backward or optimizer; ``module`` the
    class of the innermost module that makes the call, in the forward pass. ``stream`` is the number
    of the stream that a captured program launches it on, 0 for the default one. ``compiled``: the
    number of the call of a function wrapped by torch.compile that it belongs to, 0 for none.
    ``graphed``: the number of the launch of a CUDA graph that launches it, 0 for none. ``within``:
    the number of the recurrent network's pass that it belongs to (``StepCapture.networks``).
    ``recomputed``: a backward pass runs what forward has run before.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[TensorSpec, ...] = ()
    phase: str = "forward"
    module: str = ""
    stream: int = 0
    compiled: int = 0
    graphed: int = 0
    within: int = 0
    recomputed: bool = False

    def tensors(self) -> tuple[TensorSpec, ...]:
        """All input tensors in order, also those inside lists."""
        return self._inputs

    @cached_property
    def touched(self) -> tuple[TensorSpec, ...]:
        """All tensors that it reads, and then those that it writes."""
        return (*self._inputs, *self.outputs)

    @cached_property
    def touched_bytes(self) -> int:
        """Bytes of all tensors that it reads and writes."""
        return sum(t.nbytes for t in self.touched)

    def argument(self, at: int, name: str, default: Argument = None) -> Argument:
        """The argument at a position of ``args`` or of this name; ``default`` if not given."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    @cached_property
    def _inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(_tensors((*self.args, *self.kwargs.values())))


def changed(value: R, **fields: Any) -> R:
    """A copy with other fields, as of ``dataclasses.replace`` but faster: no constructor runs.

    Plan searches make millions. Cached properties are not copied.
    """
    copy, old, names = object.__new__(type(value)), vars(value), value.__dataclass_fields__
    new = vars(copy)
    new.update(old if len(old) == len(names) else {name: old[name] for name in names})
    new.update(fields)
    return copy


def _tensors(values: Iterable[Any]) -> Iterator[TensorSpec]:
    """The tensors among values, and in lists and tuples among them, in order."""
    for value in values:
        if isinstance(value, TensorSpec):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def layer_key(name: str) -> str:
    """The layer in a parameter's name: ``blocks.3`` of ``blocks.3.mlp.up.weight``; "" if none."""
    match = NUMBERED.match(name)
    return match.group(1) if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A parameter of the model and when its gradient is complete.

    The gradient is ready after call number ``ready_after`` of the step (-1: it has none).
    ``layout`` and ``nnz`` are those of ``TensorSpec``. ``local``: no other replica has it, as a
    shard of an embedding table. ``matrix``: Muon updates it (``step.hidden_matrices``).
    ``spread``: ep divides it, a stack of experts' weights, over ranks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: int
    ready_after: int
    layout: str = ""
    nnz: int = 0
    local: bool = False
    matrix: bool = False
    spread: bool = False

    @property
    def layer(self) -> str:
        """The numbered module that it belongs to, such as ``blocks.3``; "" if none."""
        return layer_key(self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter, which are also those of its gradient."""
        return stored_bytes(self.shape, self.dtype, self.layout, self.nnz)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCapture:
    """All op calls of one training or inference step, in launch order, and its host events.

    ``host`` counts what the host does without launching a kernel: ``module_call``, ``view_op``,
    ``autograd_node`` and others. ``samples`` and ``tokens`` are per step; ``tokens`` is 0 where the
    model has none. ``repeats``: how many layers of a list were left out of the capture because they
    equal those captured, by the list's name (``blocks``: 94). ``order``: of a list of several kinds
    the number of the captured layer that stands for each. ``engine`` is how the calls are launched:
    eager, graph, compile or compile+graph; ``optimizer`` is that of ``StepSettings``.
    ``inputs``: the tensors of the batch that the step is given, dense ones. ``lengths``: of its
    sequences, where they are unlike (``itercast.extras.lengths.sequences.Lengths.facts``).
    ``networks``:
    recurrent networks, forward and backward in turn, that a GPU runs as one call each: arguments of
    ``itercast.microbench.ops.matrix.recurrent.CALL``. ``synchronised``: the host waits for the
    device at the end of each step, as where steps are timed one by one; else steps follow each
    other back to back, and the host launches the next one while the device is busy. ``remarks``:
    what was left out or differs from what was asked, a line each.
    """

    calls: tuple[OpCall, ...]
    parameters: tuple[ParamSpec, ...] = ()
    host: Mapping[str, int] = field(default_factory=dict)
    samples: int = 1
    tokens: int = 0
    repeats: Mapping[str, int] = field(default_factory=dict)
    order: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    engine: str = "eager"
    optimizer: str = "none"
    inputs: tuple[TensorSpec, ...] = ()
    lengths: Mapping[str, float] = field(default_factory=dict)
    networks: tuple[Mapping[str, Any], ...] = ()
    synchronised: bool = False
    remarks: tuple[str, ...] = ()
