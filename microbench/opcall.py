"""What a capture writes down: op calls, the tensors they touch, and the step they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor as an op saw it; ``storage`` names the memory behind it (-1: unknown).

    ``zero_frac``: the share of elements known to be zero, where ``capture_zeros`` looks.
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] = ()
    storage: int = -1
    zero_frac: float = 0.0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements (not of the storage)."""
        return prod(self.shape) * ITEMSIZE_BYTES[self.dtype]

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps; true where strides are unknown."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=False):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One call of one op.

    ``args`` holds tensors (TensorSpec), scalars, strings, None and tuples of them, in schema order;
    ``phase`` is zero_grad, forward, loss, backward or optimizer.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[TensorSpec, ...] = ()
    phase: str = "forward"
    module: str = ""

    def tensors(self) -> list[TensorSpec]:
        """All input tensors, lists flattened, in order."""
        return list(_tensors((*self.args, *self.kwargs.values())))


def _tensors(values: Iterable[Any]) -> Iterator[TensorSpec]:
    for value in values:
        if isinstance(value, TensorSpec):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A parameter; its gradient is ready after backward call number ``ready_after`` of the step."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: int
    ready_after: int

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter, and of its gradient."""
        n = ITEMSIZE_BYTES[self.dtype]
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCapture:
    """One training (or inference) step: its op calls in launch order and what else the host did.

    ``host`` counts events without a kernel: ``module_call``, ``view_op``, ``autograd_node``.
    ``samples`` and ``tokens`` are per step; tokens is 0 where the model has none. ``repeats``: how
    many layers under a name were left out because they are like those captured (``blocks``: 94).
    ``engine`` is how the calls are launched: eager, graph or compile.
    """

    calls: tuple[OpCall, ...]
    parameters: tuple[ParamSpec, ...] = ()
    host: Mapping[str, int] = field(default_factory=dict)
    samples: int = 1
    tokens: int = 0
    repeats: Mapping[str, int] = field(default_factory=dict)
    engine: str = "eager"
