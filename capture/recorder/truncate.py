"""Captures a step of a deep model by a few layers of each list, or whole where that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from itercast.capture.base.remarks import remarks
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.user_errors import is_own_error, one_line_error
from itercast.capture.opcall import StepCapture, layer_key
from itercast.capture.recorder.log import capture_step
from itercast.capture.step import Inputs, Loss, StepSettings

KEPT = 3  # the middle one stands for those left out: work beside the first and last is done once


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """How many modules each list lost, by its name, and every how many their kinds repeat.

    ``periods`` has lists of several kinds alone: two periods of them are left.
    """

    repeats: dict[str, int] = field(default_factory=dict)
    periods: dict[str, int] = field(default_factory=dict)


def capture_shortened(
    name: str,
    build: Callable[[], torch.nn.Module],
    inputs: Callable[[], Inputs],
    loss: Loss,
    settings: StepSettings,
    *,
    samples: int,
    tokens: int,
    shallow: bool,
    fake: bool | FakeTensorMode = True,
) -> StepCapture:
    """Capture one step of a model as ``capture_step`` does.

    ``shallow``: three layers of every list of equal layers are captured, of layers of several kinds
    that alternate those of two periods, and how many were left out stands in ``repeats``.
    """
    left = list[Shortened]()

    def shortened() -> torch.nn.Module:
        model = build()
        left.append(shorten_lists(model) if shallow else Shortened())
        return model

    size: Any = {"samples": samples, "tokens": tokens, "fake": fake}
    try:
        with remarks() as said:
            captured = capture_step(shortened, inputs, loss, settings, **size)
    except (Exception, SystemExit) as exc:
        if is_own_error(exc):
            raise
        if not shallow:
            raise ValueError(f"{name} fails without data: {one_line_error(exc)}") from exc
    else:
        repeats, periods = left[-1].repeats, left[-1].periods
        if _all_used(captured, periods):
            return replace(captured, repeats=repeats, periods=periods, remarks=tuple(said))
    # it indexes its layers, or a step that skips some says nothing of those left out
    return capture_shortened(name, build, inputs, loss, settings, shallow=False, **size)


def _all_used(captured: StepCapture, periods: Mapping[str, int]) -> bool:
    """Whether the step uses all layers of the two periods that each of these lists was cut to."""
    read = {t.storage for c in captured.calls if c.phase == "forward" for t in c.tensors()}
    used = {p.layer for p in captured.parameters if p.storage in read}
    kept = (f"{name}.{i}" for name, period in periods.items() for i in range(2 * period))
    return used.issuperset(kept)


def shorten_lists(model: torch.nn.Module) -> Shortened:
    """Cut every outermost list of equal modules to three, of kinds that alternate to two periods.

    A list of lists of several kinds stays whole: parameters do not tell which of them they are of.
    So does one inside a layer (``stages.2.blocks``), of which it is a part.
    Modules are equal if their classes and parameter shapes are. A model that indexes such a list,
    or knows its length, breaks: capture it whole.
    """
    found = Shortened()
    for name, module in list(model.named_modules()):
        listed = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
        if not listed or len(module) <= KEPT:
            continue
        inside = layer_key(f"{name}.0.") != f"{name}.0"
        inside |= any(name.startswith(f"{outer}.") for outer in found.repeats)
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
