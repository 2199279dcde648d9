"""The shapes that a family was trained on, by GPU, so that rows of others can judge its model."""

from __future__ import annotations

from base64 import b64decode, b64encode

import numpy as np
import pandas as pd

from itercast.learners.features.table import shape_places
from itercast.microbench.ops.family import Family


def shape_hashes(rows: pd.DataFrame, family: Family) -> np.ndarray:
    """32 bits of a hash of each row's shape and GPU."""
    keys = pd.DataFrame({"place": shape_places(rows, family), "gpu": rows["gpu"].astype(str)})
    hashes = pd.util.hash_pandas_object(keys, index=False).to_numpy()
    return (hashes >> np.uint64(32)).astype("<u4")


def packed(hashes: np.ndarray) -> str:
    """Different hashes as text, for a bundle's JSON."""
    return b64encode(np.unique(hashes).tobytes()).decode()


def seen(shapes: str, rows: pd.DataFrame, family: Family) -> np.ndarray:
    """Whether each row is of one of these shapes, ``packed``, on the same GPU."""
    return np.isin(shape_hashes(rows, family), np.frombuffer(b64decode(shapes), dtype="<u4"))
