"""A deep model captured by a few of its layers: lists of equal modules cut short."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

KEPT = 2
NUMBERED = re.compile(r"((?:[^.\d][^.]*\.)*\d+(?:\.\d+)*)\.")
FILLS = ("normal_", "uniform_", "zero_", "fill_", "kaiming_uniform_", "trunc_normal_")


def layer_key(name: str) -> str:
    """``blocks.3`` of ``blocks.3.mlp.up.weight``; empty where no number is."""
    found = NUMBERED.match(name)
    return found.group(1) if found else ""


def cut_short(model: Any) -> dict[str, int]:
    """Shortens every outermost list of equal modules to two; how many were cut, by its name.

    Modules are equal where class and parameter shapes are. Lists whose owner reads them otherwise
    than by a loop break: capture such models whole.
    """
    import torch  # lazy: readers of captures need no torch

    cut: dict[str, int] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) or len(module) <= KEPT:
            continue
        inside = any(name.startswith(f"{outer}.") for outer in cut)
        if inside or len({_shape(child) for child in module}) > 1:
            continue
        cut[name] = len(module) - KEPT
        del module[KEPT:]
    return cut


def build_short(build: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """A model built without the values of its weights and cut short, and what was cut."""
    from torch.overrides import TorchFunctionMode  # lazy, as above

    class NoValues(TorchFunctionMode):
        """Leaves out what fills tensors: a captured step has no values, and it takes seconds."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(func, "__name__", "") in FILLS:
                return args[0] if args else kwargs["tensor"]
            return func(*args, **(kwargs or {}))

    with NoValues():
        model = build()
    return model, cut_short(model)


def _shape(module: Any) -> tuple[object, ...]:
    shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
    return type(module), shapes, len(list(module.modules()))
