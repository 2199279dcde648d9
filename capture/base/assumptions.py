"""Assumed numbers: values that decide forecasts and were not learned from measured rows.

Each folder of code keeps its own in ``assumptions.yaml``, by module and name:

    fallbacks:
      batch_norm_passes:
        value: 3
        unit: passes over the input
        source: ATen/native/cuda/Normalization.cuh reads the input twice, writes once
        fitted_on: []            # sources of measurements the value was fitted on, if any
        holds: training, NCHW

An entry may also state ``checked_on``, sources that it was compared with when it was chosen, and
``without``: the value that somebody would take who had seen none of these measurements. Code takes
values by ``assumed(__file__, "batch_norm_passes")``, mostly when its module is imported; a process
started inside ``leaving_out("NeuSight")`` takes the value ``without`` of every entry fitted or
checked on that source, one inside ``switching_off("fallbacks.batch_norm_passes")`` of that entry.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from itercast.capture.base.switches import environment, switched_off
from itercast.capture.base.yaml_text import OwnLoader

FILE = "assumptions.yaml"
KEYS = ("value", "unit", "source", "holds")
OPTIONAL = ("fitted_on", "checked_on", "without")
LEAVE_OUT = "ITERCAST_LEAVE_OUT"  # environment variable: a source of measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One assumed value, with its unit, where it comes from and where it holds.

    ``fitted_on`` names the sources of measurements that it was fitted on, and ``checked_on`` those
    that it was compared with: errors on both are not blind. A ``value`` may be a number, a list or
    a table of numbers. ``without``: the value to take if these sources are left out; None if there
    is none.
    """

    module: str
    name: str
    value: Any
    unit: str
    source: str
    fitted_on: tuple[str, ...] = ()
    checked_on: tuple[str, ...] = ()
    holds: str
    without: Any = None

    @property
    def seen(self) -> tuple[str, ...]:
        """Sources of measurements that the value was fitted or checked on."""
        return (*self.fitted_on, *self.checked_on)

    def is_fitted_on(self, source: str) -> bool:
        """Whether the value was fitted or checked on a source, whatever the case of its name."""
        return is_among(source, self.seen)


def is_among(source: str, names: Iterable[str]) -> bool:
    """Whether a source is named, in upper or lower case; the empty name is none."""
    return source.casefold() in {name.casefold() for name in names} - {""}


@cache
def assumptions_in(folder: Path) -> Mapping[tuple[str, str], Assumption]:
    """All assumptions of a folder by module and name; ValueError names what is missing."""
    path = folder / FILE
    assumptions = {}
    for module, entries in (yaml.load(path.read_text(), OwnLoader) or {}).items():
        for name, entry in entries.items():
            allowed = (*KEYS, *OPTIONAL)
            unknown, missing = set(entry) - set(allowed), set(KEYS) - set(entry)
            if unknown or missing:
                wrong = f"unknown {sorted(unknown)}" if unknown else f"missing {sorted(missing)}"
                raise ValueError(f"{path}: {module}.{name}: {wrong}; keys are {', '.join(allowed)}")
            seen = {key: tuple(entry.get(key) or ()) for key in ("fitted_on", "checked_on")}
            if "without" in entry and not any(seen.values()):
                needs = "'without' needs sources in fitted_on or checked_on"
                raise ValueError(f"{path}: {module}.{name}: {needs}")
            assumptions[module, name] = Assumption(module=module, name=name, **{**entry, **seen})
    return assumptions


def assumed(file: str, name: str) -> Any:
    """The value that the module ``file`` (its ``__file__``) assumes under this name.

    Its value ``without`` where a source that it was fitted or checked on is left out
    (``leaving_out``), or the number is switched off (``itercast.capture.base.switches``).
    """
    path = Path(file)
    assumptions = assumptions_in(path.parent)
    if (path.stem, name) not in assumptions:
        raise ValueError(f"{path.parent / FILE}: no assumption {path.stem}.{name}")
    number = assumptions[path.stem, name]
    is_off = switched_off() == f"{path.stem}.{name}" or number.is_fitted_on(left_out())
    return number.without if is_off and number.without is not None else number.value


def left_out() -> str:
    """The source of measurements that forecasts of this process must not rest on; '' for none."""
    return os.environ.get(LEAVE_OUT, "")


@contextmanager
def leaving_out(source: str) -> Iterator[None]:
    """Leave out a source in processes that are started inside; '' leaves out none.

    Modules that this process has imported keep their values. ``source`` is not checked.
    """
    with environment(LEAVE_OUT, source):
        yield


def all_assumptions(root: Path) -> list[Assumption]:
    """Every assumption below a folder."""
    files = sorted(root.rglob(FILE))
    return [number for file in files for number in assumptions_in(file.parent).values()]
