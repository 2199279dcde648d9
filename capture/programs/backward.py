"""Tells of each call of autograd's engine, however a program makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._C import _ImperativeEngine
from torch.autograd.variable import Variable

ARGUMENTS = ("tensors", "grad_tensors", "keep_graph", "create_graph", "inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """A pass from ``roots`` to ``inputs``, or to all leaves where there are none.

    ``accumulates``: gradients are added to the leaves', as ``backward`` does and ``grad`` does not.
    ``differentiable``: so are the gradients.
    """

    roots: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    accumulates: bool
    differentiable: bool


@contextmanager
def backward_passes(told: Callable[[Backward], AbstractContextManager[None]]) -> Iterator[None]:
    """Run each pass inside the context that ``told`` makes.

    ``Tensor.backward`` and functions of ``torch.autograd`` end in the engine; Megatron calls it.
    """
    engine: Any = Variable._execution_engine

    class Told(_ImperativeEngine):
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
            made = Backward(
                roots=_tensors(given["tensors"]),
                inputs=_tensors(given.get("inputs") or ()),
                accumulates=given.get("accumulate_grad", True),
                differentiable=given.get("create_graph", False),
            )
            with told(made):
                return engine.run_backward(*args, **kwargs)

    with patch.object(Variable, "_execution_engine", Told()):
        yield


def _tensors(values: Any) -> tuple[Tensor, ...]:
    """Those that are no edges of the graph."""
    return tuple(value for value in values if isinstance(value, Tensor))
