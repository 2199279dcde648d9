"""A case: a model with its inputs and its loss, to be forecast or measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from itercast.capture.base.slow_imports import torch
from itercast.capture.step import Inputs, Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalCase:
    """A model with its inputs and loss.

    ``inputs(batch, seq)`` returns the keyword arguments of the model's forward, ``loss(output,
    inputs)`` a scalar. ``seq`` is 0 for models without a sequence. ``measured`` cases are small
    enough for two CPU cores. ``digest`` identifies files that ``build`` reads, such as a
    configuration. ``optimizer`` trains it unless another is asked for: sgd where tables have sparse
    gradients, which Adam refuses.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[int, int], Inputs]
    loss: Loss
    batch: int
    seq: int = 0
    measured: bool = True
    digest: str = ""
    optimizer: str = "adamw"
