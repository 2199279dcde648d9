"""Shortens lists of layers, so that a deep model is captured by a few of each list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from itercast.capture.base.slow_imports import torch

KEPT = 3  # the middle one stands for those left out: work beside the first and last is done once


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """How many modules each list lost, by its name, and every how many their kinds repeat.

    ``periods`` has lists of several kinds alone: two periods of them are left.
    """

    repeats: dict[str, int] = field(default_factory=dict)
    periods: dict[str, int] = field(default_factory=dict)


def shorten_lists(model: torch.nn.Module) -> Shortened:
    """Cut every outermost list of equal modules to three, of kinds that alternate to two periods.

    A list of lists of several kinds stays whole: parameters do not tell which of them they are of.
    Modules are equal if their classes and parameter shapes are. A model that indexes such a list,
    or knows its length, breaks: capture it whole.
    """
    found = Shortened()
    for name, module in list(model.named_modules()):
        listed = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
        if not listed or len(module) <= KEPT:
            continue
        inside = any(name.startswith(f"{outer}.") for outer in found.repeats)
        if inside or _is_tables(module):
            continue
        period = _period([_shape(child) for child in module])
        if period > 1 and not all(map(_is_layer, module)):
            continue
        kept = KEPT if period == 1 else 2 * period
        if len(module) > kept:
            found.repeats[name] = len(module) - kept
            found.periods.update({name: period} if period > 1 else {})
            del module[kept:]
    return found


def _period(kinds: Sequence[object]) -> int:
    """After how many the kinds start over, the last time in full; else the number of all."""
    whole = (n for n in range(1, len(kinds)) if len(kinds) % n == 0)
    return next((n for n in whole if kinds[n:] == kinds[:-n]), len(kinds))


def _is_layer(module: torch.nn.Module) -> bool:
    listed = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    return not listed and next(module.parameters(), None) is not None


def _is_tables(modules: Any) -> bool:
    """Whether these are embedding tables, which are used side by side, not one after the other."""
    return all(isinstance(m, torch.nn.EmbeddingBag | torch.nn.Embedding) for m in modules)


def _shape(module: torch.nn.Module) -> tuple[object, ...]:
    shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
    return type(module), shapes, len(list(module.modules()))
