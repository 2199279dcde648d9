"""Which models the points of a campaign were drawn from, so that whole models can be held out.

A dataset root has a file FILE: by family and model the shapes of points that are calls of the
model, or resized ones. A shape is a text of the op and its parameters, without the dtype.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.learners.held_out import params_texts
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family, Point

FILE = "drawn-from.json"
ShapesByModel = Mapping[str, Sequence[str]]


def shape_texts(rows: pd.DataFrame, family: Family) -> np.ndarray:
    """Op and parameters of each row that are not their defaults: ``mm m=2 n=3 k=4``."""
    texts = params_texts(rows, family)
    return np.array([f"{op} {text}" for op, text in zip(rows["op"], texts, strict=True)])


def shapes_by_model(
    points: Mapping[str, Mapping[Point, Sequence[str]]],
) -> dict[str, dict[str, list[str]]]:
    """The shapes of points by family and model; ``points``: the models of each, by family."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, models_of_point in points.items():
        rows = pd.DataFrame([asdict(p) for p in models_of_point])
        by_model: dict[str, set[str]] = {}
        texts = shape_texts(rows, families()[name])
        for text, models in zip(texts.tolist(), models_of_point.values(), strict=True):
            for model in models:
                by_model.setdefault(model, set()).add(text)
        found[name] = {model: sorted(texts) for model, texts in sorted(by_model.items())}
    return found


def read_drawn_from(root: Path) -> dict[str, ShapesByModel]:
    """The shapes of a root's rows by family and model; empty where the root has no FILE."""
    path = root / FILE
    if not path.is_file():
        return {}
    try:
        read: dict[str, ShapesByModel] = json.loads(path.read_text())
        shapes = [shape for of in read.values() for each in of.values() for shape in each]
        if all(isinstance(shape, str) for shape in shapes) and set(read) <= set(families()):
            return read
    except (ValueError, AttributeError, TypeError):
        pass
    raise ValueError(f"{str(path)!r}: expected lists of shapes by family and model")
