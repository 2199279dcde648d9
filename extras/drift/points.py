"""Chooses the points that are measured again: of every family, from short to long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.learners.bundle import Bundle
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Point
from itercast.microbench.sweep.scheduler import space

CANDIDATES = 400  # points drawn per family, to choose from
LONGEST_US = 5_000.0  # of a point: longer ones leave no time for others
STRATA = 8  # of sizes; points come from them in turn


def checkable(bundle: Bundle, gpu: Gpu) -> list[str]:
    """Families that one process can measure on a device and the bundle has a model of."""
    return [
        name
        for name, family in families().items()
        if name in bundle.models
        and bundle.models[name].covers_kind(gpu)
        and family.ranks == 1
        and not family.on_demand
    ]


def stratified_points(bundle: Bundle, gpu: Gpu, threads: int, seed: int) -> dict[str, list[Point]]:
    """Lists points by family inside the training range, mixing short and long ones.

    Points are sorted by forecast time into eight equal parts, and each eight consecutive points of
    the list hold one of each part.
    """
    found = {}
    for name in checkable(bundle, gpu):
        drawn = list(dict.fromkeys(islice(space(name, Path(), gpu, seed), CANDIDATES)))
        rows = pd.DataFrame([asdict(p) for p in drawn])
        rows = rows.assign(gpu=gpu.name, threads=threads, cache="warm")
        priced = bundle.price(name, rows)
        us, inside = priced["predicted_us"].to_numpy(), priced["in_envelope"].to_numpy(dtype=bool)
        good = np.flatnonzero(inside & (us <= LONGEST_US))
        if len(good):
            found[name] = [drawn[i] for i in in_turn(us[good], good, seed)]
    return found


def in_turn(us: np.ndarray, index: np.ndarray, seed: int) -> Iterator[int]:
    """Yields ``index`` with short and long points mixed: one of each eighth by ``us``, in turn.

    ``us`` and ``index`` are the forecast time and the number of the same points; within an eighth
    the order is random.
    """
    rng = np.random.default_rng(seed)
    strata = [rng.permutation(part) for part in np.array_split(index[np.argsort(us)], STRATA)]
    for place in range(max(map(len, strata))):
        yield from (int(part[place]) for part in strata if place < len(part))
