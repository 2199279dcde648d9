"""What a case is: a model with its inputs and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalCase:
    """A model with its inputs and loss; ``measured`` cases are small enough for two cores.

    ``inputs(batch, seq)`` gives the keyword arguments of the model's forward; ``loss(output,
    inputs)`` a scalar. ``seq`` is 0 where there is none. ``digest`` names what ``build`` depends
    on beside the code in this folder, such as a configuration file.
    """

    name: str
    build: Callable[[], Any]
    inputs: Callable[[int, int], dict[str, Any]]
    loss: Callable[[Any, dict[str, Any]], Any]
    batch: int
    seq: int = 0
    measured: bool = True
    digest: str = ""
