"""NeuSight's own measured nodes, summed: a floor for what is composed of measured ops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

LABELS = Path("scripts/asplos/label")
LAYER = r"(?:^|_)(?:layer|h|layers)_0|\.(?:layer|h|layers)\.0"  # as transformers names blocks


def node_sums_us(root: Path) -> dict[str, dict[str, float]]:
    """``step`` and ``backward`` in us by the origin of a label, where nodes lie beside it.

    The table holds the nodes of a model of one layer in ms; those of the layer count
    ``num_layer`` times. Accumulating gradients is part of the backward pass.
    """
    found = {}
    for path in sorted((root / LABELS).rglob("*.csv")):
        nodes, label = pd.read_csv(path), json.loads(path.with_suffix(".json").read_text())
        inside = nodes["Name"].astype(str).str.contains(LAYER)
        inside |= nodes["meta"].astype(str).str.contains(LAYER)
        times = np.where(inside, float(label["num_layer"]), 1.0)
        us = {c: float((nodes[f"{c}_latency"] * times).sum() * 1e3) for c in ("fw", "bw", "acc")}
        origin = path.with_suffix(".json").relative_to(root / LABELS.parent)
        found[str(origin)] = {"step": sum(us.values()), "backward": us["bw"] + us["acc"]}
    return found
