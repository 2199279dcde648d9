"""A mixture of experts' products as one op: every token goes through some of many networks.

Serving software runs them in one or two kernels, whose published times teach this family for
``itercast price``. A captured step has ``grouped_mm`` of ``gemm`` and the ops around it instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.yaml_text import facts_of
from itercast.extras.published.expert_loads import Column, Count, summed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    Numbers,
    Values,
    Workload,
    by_name,
    is_any,
    itemsize_bytes,
)
from itercast.microbench.ops.sizes import points_of

# Products with matrices of hidden x inner numbers, by op.
MATRICES = {"layer": 3, "gate_up": 2, "down": 1, "down_full": 3}
DOWN = ("down", "down_full")
TILES = ((16, 64), (64, 128), (128, 128))
FLOOR_ROWS = 16  # of the tiles that ``floor_us`` counts
SWEPT = facts_of(__file__)
RESULT_BYTES = 2  # of a number that a product writes, at least
KERNEL_US: float = assumed(__file__, "kernel_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """``tokens`` vectors of ``hidden`` numbers, each sent to ``topk`` of ``experts`` networks.

    ``op`` is layer (gate and up, activation, down, weighted sum), or one of its products: gate_up
    (hidden to 2 x inner), down (inner to hidden) or down_full (down with both gradients). A rank
    holds ``local`` of the experts, with ``inner`` of their width. ``skew`` is the exponent of a
    power law of tokens over experts (``expert_loads``); then the times are of the busiest rank. 0:
    all get equally many. ``block``: how many fp8 numbers of a row share a scale; 0: all.
    """

    op: str
    tokens: int
    hidden: int
    inner: int
    experts: int
    topk: int
    local: int
    skew: float = 0.0
    block: int = 0
    dtype: str = "fp32"


def _on_one_rank(experts: int, **fields: Any) -> Experts:
    return Experts(experts=experts, local=experts, **fields)


def build(p: Experts, device: str) -> Workload:
    """Refuse the point: rows of serving software's kernels are imported."""
    raise NotImplementedError("experts of serving software are imported, not timed")


def _matrices(p: Experts) -> Numbers:
    return sum(np.asarray(is_any(p.op, (op,))) * count for op, count in MATRICES.items())


def pairs(p: Experts) -> Numbers:
    """Tokens of all local experts together, on the busiest rank."""
    return _sums(p)["pairs"]


def used(p: Experts) -> Numbers:
    """Local experts that get a token, as expected: each token picks one with chance load / tokens.

    local * (1 - (1 - topk/experts)^tokens) where experts are equally popular.
    """
    return _sums(p)["used"]


def _sums(p: Experts) -> dict[str, Column]:
    """Sums over the busiest rank's experts: (token, expert) pairs, used experts, tiles by rows."""
    counts: dict[str, Count] = {"pairs": lambda loads, _: loads, "used": _picked}
    counts |= {f"tiles_{rows}": partial(_tiles, rows) for rows, _ in TILES}
    return summed(p, counts)


def _picked(loads: Column, tokens: float) -> Column:
    """Chance that any token picks an expert of this load."""
    return 1.0 - (1.0 - np.minimum(1.0, loads / tokens)) ** tokens


def _tiles(rows: int, loads: Column, tokens: float) -> Column:
    """Tiles of so many rows that an expert's tokens fill, as expected."""
    picked = np.maximum(_picked(loads, tokens), 2**-40)
    return picked * np.ceil(loads / picked / rows)


def flops(p: Experts) -> Numbers:
    """2 * hidden * inner for each matrix of a token's expert."""
    return 2.0 * pairs(p) * p.hidden * p.inner * _matrices(p)


def bytes_moved(p: Experts) -> Values:
    """Lower bound: weights of the experts that are used, and the tokens in and out.

    Tokens are moved once; three times for down_full: the product and its two gradients.
    """
    weights = used(p) * p.hidden * p.inner * _matrices(p)
    out = np.where(np.asarray(is_any(p.op, ("gate_up",))), 2.0 * p.inner, 1.0 * p.hidden)
    into = np.where(np.asarray(is_any(p.op, DOWN)), 1.0 * p.inner, 1.0 * p.hidden)
    times = np.where(np.asarray(is_any(p.op, ("down_full",))), 3.0, 1.0)
    tokens = times * pairs(p) * (into + out)
    return (weights + tokens) * itemsize_bytes(p.dtype)


def floor_us(p: Experts, gpu: Gpu) -> Numbers:
    """Time of the kernels one after the other, each as long as its flops or its bytes take.

    Of a layer: tokens are sorted by expert, gate and up, activation, down, weighted sum. Every
    expert's tokens fill whole tiles of FLOOR_ROWS rows; products write 16 bit or more.
    """
    sums, item = _sums(p), itemsize_bytes(p.dtype)
    rate = by_name(p.dtype, {name: gpu.full_rate(name) for name in np.unique(p.dtype)})
    count, tokens, hidden, inner = sums["pairs"], 1.0 * p.tokens, p.hidden, p.inner
    flops_us = 1e6 * 2 * sums[f"tiles_{FLOOR_ROWS}"] * FLOOR_ROWS * hidden * inner / rate
    read, weights = np.minimum(count, tokens) * hidden * item, sums["used"] * hidden * inner * item
    result = np.maximum(item, RESULT_BYTES)
    wide, out = count * inner * item, count * hidden * result

    def stage(bytes_moved: Numbers, products: float = 0.0) -> Values:
        memory_us = 1e6 * bytes_moved / gpu.hbm_bytes_per_s
        return np.maximum(memory_us, products * flops_us) + KERNEL_US

    gate_up = stage(2 * weights + read + 2 * count * inner * result, 2)
    down = stage(weights + wide + out, 1)
    whole = tokens * hidden * result
    around = stage(whole + read) + stage(2 * count * inner * result + wide)
    found = {
        "layer": around + gate_up + down + stage(out + whole),
        "gate_up": gate_up,
        "down": down,
        "down_full": 3 * down,
    }
    return sum(np.where(is_any(p.op, (op,)), us, 0.0) for op, us in found.items())


def features(p: Experts, gpu: Gpu) -> dict[str, Numbers | str]:
    """Shares of weights, tokens and products in the time at full rate; waves and fill of tiles.

    Widths are left out, as they differ from model to model, and so is how many experts other ranks
    hold, as no kernel sees it.
    """
    sums, few = _sums(p), 2**-10
    count, item = np.maximum(sums["pairs"], few), itemsize_bytes(p.dtype)
    rate = by_name(p.dtype, {name: gpu.full_rate(name) for name in np.unique(p.dtype)})
    times = {
        "weights": sums["used"] * p.hidden * p.inner * item / gpu.hbm_bytes_per_s,
        "tokens": (count + p.tokens) * p.hidden * RESULT_BYTES / gpu.hbm_bytes_per_s,
        "inner": count * p.inner * RESULT_BYTES / gpu.hbm_bytes_per_s,
        "products": flops(p) / rate,
    }
    found: dict[str, Numbers | str] = {
        "op": p.op,
        "dtype": p.dtype,
        "block": p.block,
        "skew": p.skew,
        "log_used": np.log2(np.maximum(sums["used"], few)),
        "log_each": np.log2(np.maximum(1.0, sums["pairs"] / np.maximum(sums["used"], 1e-9))),
    }
    whole = np.log2(np.maximum(sum(times.values()), 1e-12))
    for name, seconds in times.items():
        found[f"log_{name}_frac"] = np.log2(np.maximum(seconds, 1e-12)) - whole
    for rows, cols in TILES:
        tiles = sums[f"tiles_{rows}"]
        waves = tiles * np.ceil(2.0 * p.inner / cols) / gpu.sm_count
        found[f"log_waves_{rows}x{cols}"] = np.log2(np.maximum(waves, few))
        found[f"log_fill_{rows}x{cols}"] = np.log2(np.maximum(tiles * rows / count, few))
    return found


FAMILY = Family(
    name="experts",
    params=Experts,
    sweep=points_of(19, SWEPT, _on_one_rank),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    floor_us=floor_us,
    answers={},
    tiled=True,
    matmul=True,
    on_demand=True,
)
