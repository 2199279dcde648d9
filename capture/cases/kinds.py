"""Makes cases of the kinds of models in ``cases.yaml``: the class of each, what it reads, its loss.

Torch is imported only when a model, inputs or a loss are made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import OwnLoader
from itercast.capture.cases.evalcase import EvalCase
from itercast.capture.step import Inputs

FILE = Path(__file__).with_name("cases.yaml")
LISTS, KINDS, INPUTS = "lists", "kinds", "inputs"  # in the file, beside groups of cases
Sizes = Mapping[str, Any]  # of a case: numbers, tuples of numbers, flags, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of model: ``model`` is its module and class below this folder.

    ``inputs`` are stated in the file or, as ``loss``, a function of ``inputs.py``. The class is
    built with a case's sizes, but those ``beside``, which only the inputs need; ``fixed`` are sizes
    of all models of this kind. ``with_seq``: the class takes the length of sequences too.
    """

    model: str
    inputs: str
    loss: str
    beside: Sequence[str] = ()
    fixed: Sizes = field(default_factory=dict)
    with_seq: bool = False


@cache
def stated() -> dict[str, dict[str, Any]]:
    """What ``cases.yaml`` states: kinds, inputs, and cases by group, each by name."""
    found: dict[str, dict[str, Any]] = yaml.load(FILE.read_text(), OwnLoader)
    return {section: facts for section, facts in found.items() if section != LISTS}


def make_case(
    name: str,
    kind: str,
    *,
    batch: int,
    seq: int = 0,
    measured: bool = False,
    optimizer: str = "adamw",
    **sizes: Any,
) -> EvalCase:
    """The case of a stated kind in these sizes."""
    chosen = Kind(**stated()[KINDS][kind])
    taken = {"seq": seq} if chosen.with_seq else {}

    def build() -> torch.nn.Module:
        module, _, model = chosen.model.rpartition(".")
        own = {size: value for size, value in sizes.items() if size not in chosen.beside}
        return _of(module, model)(**chosen.fixed, **own, **taken)

    def inputs(batch: int, seq: int) -> Inputs:
        if shapes := stated()[INPUTS].get(chosen.inputs):
            return _of("inputs", "drawn")(batch, seq, sizes, shapes)
        return _of("inputs", chosen.inputs)(batch, seq, sizes)

    return EvalCase(
        name=name,
        build=build,
        inputs=inputs,
        loss=lambda output, inputs: _of("inputs", chosen.loss)(output, inputs),
        batch=batch,
        seq=seq,
        measured=measured,
        optimizer=optimizer,
    )


def _of(module: str, name: str) -> Callable[..., Any]:
    """A class or function of a module below this folder, which needs torch."""
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)
