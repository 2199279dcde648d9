"""Runs each call of autograd's engine inside a context of ours, however a program makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import _ImperativeEngine
from torch.autograd.variable import Variable

ARGUMENTS = ("tensors", "grad_tensors", "keep_graph", "create_graph", "inputs")
LASTING = list[ExitStack]()  # contexts of the wrappers' backwards that run, see ``lasts_longer``


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """A backward pass from ``roots`` to ``inputs``, or to all leaves where there are none.

    ``accumulates``: gradients are added to ``.grad`` of leaves, as ``backward`` does and
    ``autograd.grad`` does not. ``differentiable``: gradients can be differentiated again
    (``create_graph``). ``keeps_graph``: what forward saved stays (``retain_graph``).
    """

    roots: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    accumulates: bool
    differentiable: bool
    keeps_graph: bool


@contextmanager
def backward_passes(around: Callable[[Backward], AbstractContextManager[None]]) -> Iterator[None]:
    """Let each backward pass run inside the context that ``around`` makes of it.

    ``Tensor.backward`` and functions of ``torch.autograd`` end in the engine, which Megatron calls
    itself: so the engine is replaced.
    """
    engine: Any = Variable._execution_engine

    class Engine(_ImperativeEngine):
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            """Run the engine inside ``around``: an outermost backward until its wrapper's ends."""
            arguments = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
            backward = Backward(
                roots=_tensors(arguments["tensors"]),
                inputs=_tensors(arguments.get("inputs") or ()),
                accumulates=arguments.get("accumulate_grad", True),
                differentiable=arguments.get("create_graph", False),
                keeps_graph=arguments["keep_graph"],
            )
            with ExitStack() as stack:
                within = torch._C._current_graph_task_id() >= 0  # as recomputation
                lasting = stack if within or not LASTING else LASTING[-1]
                lasting.enter_context(around(backward))
                return engine.run_backward(*args, **kwargs)

    with patch.object(Variable, "_execution_engine", Engine()):
        yield


def lasts_longer(wrapper: Any) -> None:
    """Let a backward pass last until the ``backward`` of a model's wrapper returns, if it has one.

    DeepSpeed's ``backward`` sends the last gradients after autograd is done. Lightning's modules
    have one too, but the loop calls it, and has replaced their ``forward``: they are left alone.
    """
    owns = hasattr(type(wrapper), "backward")
    if owns and vars(wrapper).keys().isdisjoint(("backward", "forward")):
        wrapper.backward = partial(_lasting, wrapper.backward)


def _lasting(backward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with ExitStack() as stack:
        LASTING.append(stack)
        stack.callback(LASTING.pop)
        return backward(*args, **options)


def _tensors(values: Any) -> tuple[Tensor, ...]:
    """The tensors among roots or inputs, which may also be edges of the graph."""
    return tuple(value for value in values if isinstance(value, Tensor))
