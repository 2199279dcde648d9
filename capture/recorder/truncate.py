"""Shortens lists of equal layers, so that a deep model is captured by three of each list."""

from __future__ import annotations

from typing import Any

from itercast.capture.base.slow_imports import torch

KEPT = 3  # the middle one stands for those left out: work beside the first and last is done once


def shorten_lists(model: torch.nn.Module) -> dict[str, int]:
    """Cut every outermost list of equal modules to three; the number removed by the list's name.

    Modules are equal if their classes and parameter shapes are. A model that indexes such a list,
    or knows its length, breaks: capture it whole.
    """
    cut: dict[str, int] = {}
    for name, module in list(model.named_modules()):
        listed = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
        if not listed or len(module) <= KEPT:
            continue
        inside = any(name.startswith(f"{outer}.") for outer in cut)
        if inside or _is_tables(module) or len({_shape(child) for child in module}) > 1:
            continue
        cut[name] = len(module) - KEPT
        del module[KEPT:]
    return cut


def _is_tables(modules: Any) -> bool:
    """Whether these are embedding tables, which are used side by side, not one after the other."""
    return all(isinstance(m, torch.nn.EmbeddingBag | torch.nn.Embedding) for m in modules)


def _shape(module: torch.nn.Module) -> tuple[object, ...]:
    shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
    return type(module), shapes, len(list(module.modules()))
