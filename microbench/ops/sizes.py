"""Sizes of points for a GPU: drawn at tile edges, and made larger or smaller axis by axis."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any, TypeVar, cast

import numpy as np

from itercast.microbench.ops.family import Point, log_uniform

P = TypeVar("P")
RANGE = re.compile(r"(?:(\d+) \* |(mostly|edge) )?(\d+)\.\.(\d+)")
MOSTLY = 0.7  # no assumption: share of a sweep
MAX_ALIGNMENT = 128
MAX_SIDE = 2**18  # of a matrix: tokens of a batch, a vocabulary
MAX_BATCH = 1024
MAX_ROWS = 2**21
MAX_NUMEL = 2**31 - 1
MAX_PIXELS_A_SIDE = 512
# As ``gpu_iterations`` trains, and a little fp16 to compare with published rows.
# no assumption: shares of a sweep
MATMUL_DTYPES = {"bf16": 0.47, "fp32": 0.25, "tf32": 0.25, "fp16": 0.03}
TILE_EDGES: tuple[int, ...] = (
    *(64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1600, 2048, 2560, 3072),
    *(4096, 5120, 6144, 8192, 10240, 12288, 16384),
)


def tile_edge_or_any(rng: np.random.Generator, low: int, high: int) -> int:
    """Draws a size: half the time at or near a tile edge, else any, mostly multiples of 8."""
    if rng.random() < 0.5:
        edges = [e for e in TILE_EDGES if low <= e <= high]
        return int(rng.choice(edges)) + int(rng.choice([-8, -1, 0, 0, 0, 1, 8]))
    n = log_uniform(rng, low, high)
    return max(8, 8 * round(n / 8)) if rng.random() < 0.8 else n


def drawn(rng: np.random.Generator, stated: Any) -> Any:
    """A value as the YAML file of a family states it.

    A list: one of its values. A mapping: a name, by its share. ``4..64``: log-uniform; before it
    ``8 *`` multiplies, ``mostly`` makes most a multiple of 8, ``edge`` draws near edges of tiles.
    Anything else: itself.
    """
    if isinstance(stated, Mapping):
        shares = np.array(list(stated.values()))
        return str(rng.choice(list(stated), p=shares / shares.sum()))
    if isinstance(stated, list):
        return drawn(rng, stated[int(rng.integers(len(stated)))])
    match = RANGE.fullmatch(stated) if isinstance(stated, str) else None
    if match is None:
        return stated
    low, high = int(match[3]), int(match[4])
    if match[2] == "edge":
        return tile_edge_or_any(rng, low, high)
    n = log_uniform(rng, low, high)
    if match[2] == "mostly" and rng.random() < MOSTLY:
        n = max(8, 8 * round(n / 8))
    return n * int(match[1] or 1)


def points_of(seed: int, *how: Any) -> Callable[[], Iterator[Point]]:
    """Makes a family's ``sweep()``: points ``swept`` as ``how`` says, the same ones each time."""
    return lambda: swept(np.random.default_rng(seed), *how)


def swept(
    rng: np.random.Generator,
    stated: Mapping[str, Any],
    make: Callable[..., P],
    fits: Callable[[P], bool] = lambda p: True,
    finish: Callable[[np.random.Generator, P], P] = lambda rng, p: p,
) -> Iterator[P]:
    """Yields points without end, of the kinds that the YAML file of a family states.

    Each kind has a ``share`` of the points and the fields of one, ``drawn``; a key may name several
    fields. ``make`` takes them by name; points that do not fit are left out. ``finish`` draws what
    the file does not state.
    """
    shares = {kind: fields.get("share", 1.0) for kind, fields in stated.items()}
    while True:
        fields = {
            names: how for names, how in stated[drawn(rng, shares)].items() if names != "share"
        }
        p = make(**{n: drawn(rng, how) for names, how in fields.items() for n in names.split()})
        if fits(p):
            yield finish(rng, p)


def aligned(wanted: float, old: int) -> int:
    """A whole number near ``wanted`` that the same power of two divides as ``old``, up to 128.

    Kernels for rows of 8, 16 or 128 elements differ; odd stays odd.
    """
    unit = gcd(old, MAX_ALIGNMENT)
    while unit > 1 and wanted < 4 * unit:
        unit //= 2
    if unit == 1 and old % 2:
        return max(1, 2 * round((wanted - 1) / 2) + 1)
    return max(1, unit * round(wanted / unit))


def scale_axes(p: P, factor: float, first_share: float, limits: Mapping[str, int]) -> P:
    """The point with ``factor`` times the elements, factor**first_share along the first axis.

    The other axes of ``limits`` take the rest, in their order; none passes its limit."""
    factor_left, changes = factor, {}
    for number, (name, limit) in enumerate(limits.items()):
        size = getattr(p, name)
        share = first_share if number + 1 < len(limits) else 1.0
        changes[name] = min(max(limit, size), aligned(size * factor_left**share, size))
        factor_left *= size / changes[name]
    same: Point = p
    return cast(P, replace(same, **changes))


def resize_along(limits: Mapping[str, int]) -> Callable[[Point, float, float], Point]:
    """Make a family's ``resize(point, factor, first_share)``, which changes a point's work.

    ``limits``: the largest value of each axis that may change, by name, first axis first. The first
    axis grows factor**first_share times, the others take the rest (see ``scale_axes``).
    """
    return lambda p, factor, first_share: scale_axes(p, factor, first_share, limits)
