"""Machine files: what measured steps say of a machine, as YAML for forecasts to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from itercast.capture.base.yaml_text import read_mapping
from itercast.compose.machines.factors import NAMES
from itercast.compose.machines.state import Machine
from itercast.compose.machines.typical import REST, spread_of, stated

KEYS = ("gpu", "anchors", "models", "mean", "covariance", "typical", "measured", "seen")

OLDER = "; `itercast calibrate --iterations` makes files of older versions anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMachine:
    """What measured steps say of a machine with these GPUs; ``anchors``: the steps in words."""

    gpu: str
    machine: Machine
    anchors: tuple[str, ...] = ()

    def text(self) -> str:
        """The machine file."""
        facts = {
            "gpu": self.gpu,
            "anchors": list(self.anchors),
            "models": list(self.machine.models),
            "mean": list(self.machine.mean),
            "covariance": [list(row) for row in self.machine.covariance],
            "typical": stated(self.machine.typical),
            "measured": list(self.machine.measured),
            "seen": list(self.machine.seen),
        }
        head = "# Written by itercast calibrate --iterations. Mean and covariance of log factors: "
        return f"{head}{', '.join(NAMES)}, then of models.\n" + yaml.safe_dump(facts)


def read_machine(path: Path) -> KnownMachine:
    """Read a machine file; ValueError names what is wrong with it."""
    facts, file = read_mapping(path, "machine file"), f"machine file {str(path)!r}"
    if set(facts) != set(KEYS):
        raise ValueError(f"{file}: keys are {KEYS}, got {sorted(facts)}{OLDER}")
    try:
        if set(facts["typical"]) != {*NAMES, *REST}:
            raise ValueError(f"typical is of {(*NAMES, *REST)}, got {[*facts['typical']]}{OLDER}")
        return _made(facts)
    except (ValueError, TypeError, LookupError) as exc:
        told = str(exc) if isinstance(exc, ValueError) else f"{type(exc).__name__} {exc}"
        raise ValueError(f"{file}: {told}") from None


def _made(facts: Mapping[str, Any]) -> KnownMachine:
    """The machine of a file's content; ValueError where its numbers are no distribution."""
    models, mean = tuple(map(str, facts["models"])), np.array(facts["mean"], dtype=float)
    covariance = np.array(facts["covariance"], dtype=float)
    size, seen = len(NAMES) + len(models), np.array(facts["seen"], dtype=float)
    if mean.shape != (size,) or covariance.shape != (size, size):
        raise ValueError(f"mean and covariance are of {size} numbers, factors and models")
    if not all(np.isfinite(found).all() for found in (mean, covariance, seen)) or seen.min() < 0:
        raise ValueError("mean, covariance and seen are finite numbers, seen from 0")
    if np.linalg.eigvalsh(covariance).min() < -1e-9 or not np.allclose(covariance, covariance.T):
        raise ValueError("covariance is none: it has a negative variance, or is not symmetric")
    machine = Machine(
        typical=spread_of(facts["typical"]),
        mean=tuple(mean.tolist()),
        covariance=tuple(map(tuple, covariance.tolist())),
        models=models,
        measured=tuple(map(str, facts["measured"])),
        seen=(int(seen[0]), float(seen[1])),
    )
    return KnownMachine(
        gpu=str(facts["gpu"]), machine=machine, anchors=tuple(map(str, facts["anchors"]))
    )
