"""Sum NeuSight's measured graph nodes to iterations: the error left when every op was measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

LABELS = Path("scripts/asplos/label")
LAYER = r"(?:^|_)(?:layer|h|layers)_0|\.(?:layer|h|layers)\.0"  # as transformers names blocks


def node_sums_us(root: Path) -> dict[str, dict[str, float]]:
    """Summed times ``step`` and ``backward`` in us, by label file, for labels with a node table.

    The tables hold the nodes of a model with one layer, in ms; nodes of that layer count
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
