"""Files that say which results of a layer its checkpoint saves, under ``recompute=budget``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from itercast.capture.base.files import write_atomic
from itercast.capture.opcall import StepCapture
from itercast.compose.target import Target
from itercast.extras.checkpoints.layers import checkpoint_layers, places_by_layer
from itercast.microbench.store import Row


def checkpoint(model: Any, policy: Path) -> None:
    """Make each numbered layer of a torch module save and recompute as a policy file says."""
    try:
        kept = places_by_layer(json.loads(policy.read_text())["layers"])
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise ValueError(f"policy {str(policy)!r}: {type(exc).__name__} {exc}") from None
    checkpoint_layers(model, kept)


def write_policy(path: Path, step: StepCapture, target: Target) -> None:
    """Write which ops' results the layers' checkpoints save."""
    plan = target.plan
    if plan.recompute != "budget":
        raise ValueError(f"--policy needs a plan with recompute=budget:SHARE, got {str(plan)!r}")
    layers = checkpoint_policy(step, target)
    text = json.dumps({"plan": str(plan), "layers": layers}, indent=1)
    write_atomic(path, text.encode())


def checkpoint_policy(step: StepCapture, target: Target) -> list[Row]:
    """What a plan's selective checkpoints save: ``kept`` ops of ``count`` layers in a row."""
    return [
        {"layer": x.layer.name, "count": x.layer.count, "kept": [list(op) for op in x.kept]}
        for x in target.priced(step).layers
        if x.numbered
    ]
