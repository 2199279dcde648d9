"""TorchScript under a capture: what ``torch.jit`` would compile runs as the Python that it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

MARK = "_itercast_scripted"  # an attribute of modules, which their copies have too
COMPILED = torch.jit.ScriptModule


def is_scripted(value: Any) -> bool:
    """Whether a value is a module that ``torch.jit`` would have compiled."""
    return isinstance(value, torch.nn.Module) and MARK in vars(value)


class _Scripted(type):
    """The class of ``ScriptModule``: modules given to ``torch.jit`` are instances of it, too."""

    def __instancecheck__(cls, value: Any) -> bool:
        return is_scripted(value) or isinstance(value, COMPILED) or super().__instancecheck__(value)


class ScriptModule(torch.nn.Module, metaclass=_Scripted):
    """As ``torch.jit.ScriptModule``: those that a program derives from it are plain modules."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; one with its type for the compiler is the value alone."""
        plain = value.value if isinstance(value, torch.jit.Attribute) else value
        super().__setattr__(name, plain)


def scripted(value: Any) -> Any:
    """The value, which passes as compiled if it is a module."""
    if isinstance(value, torch.nn.Module):
        vars(value)[MARK] = True
    return value


def _marking(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``torch.jit`` whose result is taken as compiled, though it is Python."""
    return lambda *args, **options: scripted(compile_(*args, **options))


@contextmanager
def scripted_as_python() -> Iterator[None]:
    """Let functions and modules that ``torch.jit`` would compile stay Python inside the context.

    Its modes and patches replace torch's functions, which compiled code does not call.
    """

    def as_it_is(module: Any, *args: Any, **options: Any) -> Any:
        return module

    names = ("script", "trace", "trace_module")
    new: dict[str, Any] = {name: _marking(getattr(torch.jit, name)) for name in names}
    new |= dict.fromkeys(("freeze", "optimize_for_inference"), as_it_is)
    new |= dict.fromkeys(("ScriptModule", "RecursiveScriptModule"), ScriptModule)
    with (
        patch.multiple(torch.jit, **new),
        patch.object(torch.jit._state._enabled, "enabled", False),
        patch.dict(os.environ, {"PYTORCH_JIT": "0"}),  # as above, for forward-mode gradients
    ):
        yield
