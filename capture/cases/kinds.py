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

from itercast.capture.base.extensions import with_added
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import OwnLoader
from itercast.capture.cases.evalcase import EvalCase
from itercast.capture.step import Inputs

FILE = Path(__file__).with_name("cases.yaml")
LISTS, KINDS, INPUTS = "lists", "kinds", "inputs"  # in the file, beside groups of cases
Sizes = Mapping[str, Any]  # of a case: numbers, tuples of numbers, flags, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of model: ``model`` is its module and class, below this folder or named in full.

    ``inputs`` are stated in the file or, as ``loss``, a function of ``inputs.py`` or one named in
    full. The class is built with a case's sizes, but those ``beside``, which only the inputs need;
    ``fixed`` are sizes of all models of this kind. ``with_seq``: the class takes the length of
    sequences too.
    """

    model: str
    inputs: str
    loss: str
    beside: Sequence[str] = ()
    fixed: Sizes = field(default_factory=dict)
    with_seq: bool = False


@cache
def stated() -> dict[str, dict[str, Any]]:
    """The sections of ``cases.yaml`` and of packages' such files, joined: each section by name.

    Sections are "kinds", "inputs" and groups of cases.
    """
    sections: dict[str, dict[str, Any]] = {}
    for path in (FILE, *with_added("case_files", {}, Path).values()):
        for section, facts in yaml.load(path.read_text(), OwnLoader).items():
            if section != LISTS:
                sections[section] = {**sections.get(section, {}), **facts}
    return sections


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
    """A case of a kind that ``cases.yaml`` states, in these sizes."""
    chosen = Kind(**stated()[KINDS][kind])

    def build() -> torch.nn.Module:
        options = {size: value for size, value in sizes.items() if size not in chosen.beside}
        options |= {"seq": seq} if chosen.with_seq else {}
        return _imported(chosen.model)(**chosen.fixed, **options)

    def inputs(batch: int, seq: int) -> Inputs:
        if shapes := stated()[INPUTS].get(chosen.inputs):
            return _imported("drawn")(batch, seq, sizes, shapes)
        return _imported(chosen.inputs)(batch, seq, sizes)

    return EvalCase(
        name=name,
        build=build,
        inputs=inputs,
        loss=lambda output, inputs: _imported(chosen.loss)(output, inputs),
        batch=batch,
        seq=seq,
        measured=measured,
        optimizer=optimizer,
    )


def _imported(path: str) -> Callable[..., Any]:
    """Import what a path names: ``mean_square`` of inputs.py, ``models.vision.Vit``, or in full."""
    module, _, name = path.rpartition(".")
    if not module or module.startswith("models."):
        module = f"{__package__}.{module or 'inputs'}"
    return getattr(importlib.import_module(module), name)
