"""The shapes that a family was trained on, by GPU, so that rows of others can judge its model."""

from __future__ import annotations

from base64 import b64decode, b64encode

import numpy as np
import pandas as pd

from itercast.learners.features.table import shape_places
from itercast.microbench.ops.family import Family

BITS = "<u4"


def with_shapes(shapes: str, rows: pd.DataFrame, family: Family) -> str:
    """``shapes``, as kept in a bundle's JSON, with those of the rows added.

    The text is base64 of sorted 32-bit hashes of shape and GPU.
    """
    hashes = np.union1d(_unpacked(shapes), _hashes(rows, family))
    return b64encode(hashes.tobytes()).decode()


def seen(shapes: str, rows: pd.DataFrame, family: Family) -> np.ndarray:
    """Whether each row is of one of these shapes on the same GPU."""
    return np.isin(_hashes(rows, family), _unpacked(shapes))


def _hashes(rows: pd.DataFrame, family: Family) -> np.ndarray:
    """32 bits of a hash of each row's shape and GPU."""
    keys = pd.DataFrame({"place": shape_places(rows, family), "gpu": rows["gpu"].astype(str)})
    hashes = pd.util.hash_pandas_object(keys, index=False).to_numpy()
    return (hashes >> np.uint64(32)).astype(BITS)


def _unpacked(shapes: str) -> np.ndarray:
    return np.frombuffer(b64decode(shapes), dtype=BITS)
