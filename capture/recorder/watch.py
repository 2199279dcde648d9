"""Watches a step while its ops are captured: dtypes, module calls, host events, gradients."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from itercast.capture.step import StepSettings, update_event

SIZED = (dict, list, set, tuple)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make ``dtype`` torch's default for new floating-point tensors inside the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def count_host_events(log: Any, settings: StepSettings, parameters: int) -> None:
    """Add the host events of autograd and the optimizer to the log.

    ``parameters`` is the number of those that are trained. Inference records no autograd nodes.
    """
    if settings.mode != "train":
        log.host["autograd_node"] = 0
        return
    log.host |= {"zero_grad": parameters, "accumulate_grad": parameters, "backward": 1}
    if settings.optimizer != "none":
        log.host[update_event(settings.optimizer)] = parameters


def record_ready_gradients(model: torch.nn.Module, log: Any) -> dict[str, int]:
    """The number of the last op call before each parameter's gradient is complete, by name.

    The dict is filled while the backward pass runs.
    """
    ready: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: ready.__setitem__(name, len(log.calls) - 1)
            )
    return ready


def attributes(model: torch.nn.Module, counted: Collection[str] = ()) -> list[int]:
    """Ids and lengths of the attributes of modules and of objects that they hold.

    Equal lists before and after a step show that it changed no attribute, except ``counted`` names.
    """
    values = attribute_values(model, counted)
    return [*map(id, values), *(len(v) for v in values if isinstance(v, SIZED))]


def attribute_values(model: torch.nn.Module, counted: Collection[str] = ()) -> list[Any]:
    """Values of attributes of modules and of objects that they hold, except ``counted`` names."""
    values = [v for m in model.modules() for n, v in vars(m).items() if n not in counted]
    values += torch.nn.Module.buffers(model)  # Megatron's wrappers have a list of this name
    plain = [v for v in values if hasattr(v, "__dict__")]
    helpers = [v for v in plain if not isinstance(v, torch.Tensor | torch.nn.Module | type)]
    return values + [v for helper in helpers for v in vars(helper).values()]


def accumulates(inputs: object) -> bool:
    """Whether some of these inputs have gradients, which no step sets to zero."""
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in tree_leaves(inputs))


class MadeBy:
    """Tells to which numbered stretch of a step, such as a compiled call, the running op belongs.

    In backward it is the stretch in which forward made the autograd node that runs.
    """

    def __init__(self) -> None:
        self.running = 0  # number of the stretch that runs now, 0 for none
        self._nodes: list[tuple[int, int]] = []  # first autograd node of a stretch, its number

    @contextmanager
    def stretch(self, number: int) -> Iterator[None]:
        """Number the ops inside, and those of their backward."""
        self._note(number)
        try:
            yield
        finally:
            self._note(0)

    def _note(self, number: int) -> None:
        """Note that autograd's nodes belong to this number from here on."""
        self.running = number
        self._nodes.append((int(torch._C._autograd._get_sequence_nr()), number))

    def number(self) -> int:
        """The number that the op that runs now belongs to, 0 for none."""
        return self.running or self.of(torch._C._current_autograd_node())

    def of(self, node: Any) -> int:
        """The number of the stretch in which one of autograd's nodes was made, 0 for none."""
        sequence_nr = -1 if node is None else node._sequence_nr()
        at = bisect_right(self._nodes, (sequence_nr, math.inf)) - 1
        return self._nodes[at][1] if at >= 0 else 0


class ModuleTracker:
    """Counts module calls in a log and tells it the class of the innermost running module."""

    def __init__(self, log: Any) -> None:
        self.log = log
        self.outer: list[str] = []

    def __enter__(self) -> None:
        from torch.nn.modules.module import (
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )

        self.handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),  # recomputing stops early
        ]

    def __exit__(self, *exc: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, module: torch.nn.Module, args: object) -> None:
        self.log.host["module_call"] += 1
        self.outer.append(self.log.module)
        self.log.module = type(module).__name__

    def _leave(self, module: torch.nn.Module, args: object, output: object) -> None:
        self.log.module = self.outer.pop()
