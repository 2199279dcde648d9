"""Captures a step of a deep model by a few layers of each list, or whole where that breaks it.

A list of equal layers is cut to three; one of kinds that alternate to two periods. In a list of
several kinds two of each run, and the last of all; others return their input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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
    """What was cut from lists, by name. ``repeats``: how many modules lists of equal ones lost.

    ``order``: for lists of several kinds, by layer the number of the layer that stands for it.
    """

    repeats: dict[str, int] = field(default_factory=dict)
    order: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Skipped(torch.nn.Module):
    """Stands for a layer that equals an earlier one, and returns its input.

    It has the layer's attributes; the layer's parameters are no part of the model.
    """

    def __init__(self, layer: torch.nn.Module, passes_on: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, passes_on=passes_on)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The first input, in the form of what the layer would return."""
        return self.passes_on(*args, **kwargs)


def _passing_on(equal: torch.nn.Module, undo: ExitStack) -> Callable[..., Any]:
    """A forward that returns its first input, in the form that the layer ``equal`` returned.

    ``undo`` removes the hook that notes that form. When ``equal`` runs: ValueError if its output
    has another shape than its input, as equal layers could not follow each other.
    """
    returned: list[Any] = []

    def note(layer: object, args: Any, kwargs: Any, output: Any) -> None:
        inputs, result = _first((*args, *kwargs.values())), _first(output)
        if not isinstance(result, torch.Tensor) or result.shape != getattr(inputs, "shape", None):
            raise ValueError(f"{type(layer).__name__} returns no tensor like that it is given")
        returned[:] = [output]

    def passes_on(*args: Any, **kwargs: Any) -> Any:
        first_input = _first((*args, *kwargs.values()))
        return (first_input, *returned[0][1:]) if isinstance(returned[0], tuple) else first_input

    undo.callback(equal.register_forward_hook(note, with_kwargs=True).remove)
    return passes_on


def _first(values: Any) -> Any:
    """The first element of a tuple, None if it is empty; any other value itself."""
    return next(iter(values), None) if isinstance(values, tuple) else values


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

    ``shallow``: three layers of every list of equal layers are captured, two of each kind where
    there are several, and the last; ``repeats`` and ``order`` of the capture say which layers stand
    for others. Where that fails, or leaves one of them unused, the whole model is captured.
    """
    lost = list[Shortened]()

    def shortened() -> torch.nn.Module:
        model = build()
        lost.append(shorten_lists(model, undo) if shallow else Shortened())
        return model

    size: Any = {"samples": samples, "tokens": tokens, "fake": fake}
    try:
        with remarks() as texts, ExitStack() as undo:
            captured = capture_step(shortened, inputs, loss, settings, **size)
    except (Exception, SystemExit) as exc:
        if is_own_error(exc):
            raise
        if not shallow:
            raise ValueError(f"{name} fails without data: {one_line_error(exc)}") from exc
    else:
        repeats, order = lost[-1].repeats, lost[-1].order
        if _all_used(captured, order):
            return replace(captured, repeats=repeats, order=order, remarks=tuple(texts))
    # the model indexes its layers, or its step leaves out some that stand for others
    return capture_shortened(name, build, inputs, loss, settings, shallow=False, **size)


def _all_used(captured: StepCapture, order: Mapping[str, Sequence[int]]) -> bool:
    """Whether the step uses each layer in ``order`` that stands for others of its list."""
    read = {t.storage for c in captured.calls if c.phase == "forward" for t in c.tensors()}
    used = {p.layer for p in captured.parameters if p.storage in read}
    return used.issuperset(f"{name}.{i}" for name, stands in order.items() for i in stands)


def shorten_lists(model: torch.nn.Module, undo: ExitStack) -> Shortened:
    """Shorten every outermost list of modules in which some stand for others; ``undo`` restores it.

    Modules are equal if their classes and parameter shapes are. A list stays whole if it lies
    inside a layer (``stages.2.blocks``), if it holds lists of several kinds, or if more than half
    of its modules would stay. A model that indexes a shortened list, or knows its length, breaks:
    capture it whole.
    """
    lost = Shortened()
    for name, module in list(model.named_modules()):
        listed = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
        if not listed or len(module) <= KEPT:
            continue
        inside = layer_key(f"{name}.0.") != f"{name}.0"
        inside |= any(name.startswith(f"{outer}.") for outer in {**lost.repeats, **lost.order})
        if inside or _is_tables(module):
            continue
        kinds, whole = [_shape(child) for child in module], dict(module._modules)
        if len({*kinds}) == 1:
            lost.repeats[name] = len(module) - KEPT
            del module[KEPT:]
        elif all(map(_is_layer, module)):
            order = standing(kinds)
            if len({*order}) <= len(order) // 2:
                lost.order[name] = order
                _shorten(module, order, undo)
        undo.callback(module._modules.update, whole)
    return lost


def _shorten(layers: Any, order: Sequence[int], undo: ExitStack) -> None:
    """Cut a list after the last layer that stands for others; unneeded ones pass their input on."""
    del layers[max(order) + 1 :]
    left_out = {*range(len(layers))} - {*order}
    passing = {i: _passing_on(layers[i], undo) for i in {order[i] for i in left_out}}
    for i in left_out:
        layers[i] = Skipped(layers[i], passing[order[i]])


def standing(kinds: Sequence[object]) -> tuple[int, ...]:
    """For each layer of a list of several kinds, the number of the layer that stands for it.

    The first of each kind stands for itself, since some work is done only once, and the second for
    all others. If kinds alternate, layers of the first two periods stand for all, the last of these
    for the last layer alone: kinds ABABABAB are (0, 1, 2, 1, 2, 1, 2, 3).
    """
    run_length = min(2 * _period(kinds), len(kinds))
    standing_in = {kind: list[int]() for kind in kinds}
    order = []
    for i, kind in enumerate(kinds[:-1]):
        if len(standing_in[kind]) < 2 and i < run_length - 1:
            standing_in[kind].append(i)
        order.append(standing_in[kind][-1])
    return (*order, run_length - 1)


def _period(kinds: Sequence[object]) -> int:
    """The smallest divisor n of the length after which kinds repeat; else the length itself."""
    divisors = (n for n in range(1, len(kinds)) if len(kinds) % n == 0)
    return next((n for n in divisors if kinds[n:] == kinds[:-n]), len(kinds))


def _is_layer(module: torch.nn.Module) -> bool:
    """Whether a module is no list of modules, and has parameters."""
    listed = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    return not listed and next(module.parameters(), None) is not None


def _is_tables(modules: Any) -> bool:
    """Whether these are embedding tables, which are used side by side, not one after the other."""
    return all(isinstance(m, torch.nn.EmbeddingBag | torch.nn.Embedding) for m in modules)


def _shape(module: torch.nn.Module) -> tuple[object, ...]:
    """What equal layers have in common: class, shapes of parameters, number of modules inside."""
    shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
    return type(module), shapes, len(list(module.modules()))
