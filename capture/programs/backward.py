"""Runs each call of autograd's engine inside a context of ours, however a program makes it."""

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
    """A backward pass from ``roots`` to ``inputs``, or to all leaves where there are none.

    ``accumulates``: gradients are added to ``.grad`` of leaves, as ``backward`` does and
    ``autograd.grad`` does not. ``differentiable``: gradients can be differentiated again
    (``create_graph``).
    """

    roots: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    accumulates: bool
    differentiable: bool


@contextmanager
def backward_passes(around: Callable[[Backward], AbstractContextManager[None]]) -> Iterator[None]:
    """Let each backward pass run inside the context that ``around`` makes of it.

    ``Tensor.backward`` and functions of ``torch.autograd`` end in the engine, which Megatron calls
    itself: so the engine is replaced.
    """
    engine: Any = Variable._execution_engine

    class Engine(_ImperativeEngine):
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
            backward = Backward(
                roots=_tensors(arguments["tensors"]),
                inputs=_tensors(arguments.get("inputs") or ()),
                accumulates=arguments.get("accumulate_grad", True),
                differentiable=arguments.get("create_graph", False),
            )
            with around(backward):
                return engine.run_backward(*args, **kwargs)

    with patch.object(Variable, "_execution_engine", Engine()):
        yield


def _tensors(values: Any) -> tuple[Tensor, ...]:
    """The tensors among roots or inputs, which may also be edges of the graph."""
    return tuple(value for value in values if isinstance(value, Tensor))
