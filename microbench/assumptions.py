"""Assumed numbers: values that decide forecasts and were not learned from measured rows.

Each folder of code keeps its own in ``assumptions.yaml``, by module and name:

    fallbacks:
      batch_norm_passes:
        value: 3
        unit: passes over the input
        source: ATen/native/cuda/Normalization.cuh reads the input twice, writes once
        fitted_on: []            # sources of measurements the value was fitted on, if any
        holds: training, NCHW

Code takes them by ``assumed(__file__, "batch_norm_passes")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = "assumptions.yaml"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C, eight times as fast
KEYS = ("value", "unit", "source", "fitted_on", "holds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One assumed value, with its unit, where it comes from and where it holds.

    ``fitted_on`` names the sources of measurements it was fitted on: errors on those sources are
    not blind. A ``value`` may be a number, a list or a table of numbers.
    """

    module: str
    name: str
    value: Any
    unit: str
    source: str
    fitted_on: tuple[str, ...] = ()
    holds: str


@cache
def assumptions_in(folder: Path) -> Mapping[tuple[str, str], Assumption]:
    """All assumptions of a folder by module and name; ValueError names what is missing."""
    path = folder / FILE
    found = {}
    for module, entries in (yaml.load(path.read_text(), _Loader) or {}).items():
        for name, entry in entries.items():
            unknown, missing = set(entry) - set(KEYS), set(KEYS) - {"fitted_on"} - set(entry)
            if unknown or missing:
                wrong = f"unknown {sorted(unknown)}" if unknown else f"missing {sorted(missing)}"
                raise ValueError(f"{path}: {module}.{name}: {wrong}; keys are {', '.join(KEYS)}")
            fitted_on = tuple(entry.get("fitted_on") or ())
            fields = {**entry, "fitted_on": fitted_on}
            found[module, name] = Assumption(module=module, name=name, **fields)
    return found


def assumed(file: str, name: str) -> Any:
    """The value that the module ``file`` (its ``__file__``) assumes under this name."""
    path = Path(file)
    known = assumptions_in(path.parent)
    if (path.stem, name) not in known:
        raise ValueError(f"{path.parent / FILE}: no assumption {path.stem}.{name}")
    return known[path.stem, name].value


def all_assumptions(root: Path) -> list[Assumption]:
    """Every assumption below a folder."""
    return [
        one for path in sorted(root.rglob(FILE)) for one in assumptions_in(path.parent).values()
    ]
