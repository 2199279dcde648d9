"""A deep model captured by a few of its layers: lists of equal modules cut short."""

from __future__ import annotations

from typing import Any

KEPT = 2


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


def _shape(module: Any) -> tuple[object, ...]:
    shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
    return type(module), shapes, len(list(module.modules()))
