"""Random index streams for measurements, of points of any family that looks rows up, and features.

Such a point has ``rows``, ``lookups`` and its stream: ``unique`` distinct rows, looked up as often
as the histogram ``reuse`` says (``itercast.extras.lookups.reuse``); where that is empty,
rows drawn with the Zipf exponent ``skew``, of which a share ``repeats`` repeats one of the 1,024
before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.extras.lookups.reuse import (
    LEAST,
    MOST,
    draw_indices,
    expected_hit_frac,
    histogram,
    histogram_text,
    hit_frac,
    parse_histogram,
    reuse_of,
    scatter_factor,
)
from itercast.microbench.ops.family import Numbers, Tensor, Values

Stream = Any  # parameters with a stream, of any family
KINDS = ("uniform", "zipf", "trace", "histogram")
MAX_SIGMA = 2.0  # of the logarithm of how often rows are looked up
DRAWN_ROWS = 4096
SHOWN_BINS = (0, 2, 5, 9, 13)  # of the histogram, as features
RECENT = 1024
LINE_BYTES = 64
# Of a GPU's last cache: the share that holds rows, and a hit's time over that of memory.
HOLDS_ROWS: float = assumed(__file__, "holds_rows")
HIT_COST: float = assumed(__file__, "hit_cost")


def with_random_stream(rng: np.random.Generator, p: Stream) -> Stream:
    """The point with an index stream of a random kind: uniform, Zipf, as a trace, by histogram.

    As a trace: Zipf, and a share of the lookups repeats rows looked up shortly before. By
    histogram: rows are looked up log-normally often.
    """
    kind = str(rng.choice(KINDS))
    if kind == "histogram":
        return _with_random_histogram(rng, p)
    return replace(
        p,
        skew=0.0 if kind == "uniform" else round(float(rng.uniform(0.6, 1.3)), 2),
        repeats=round(float(rng.uniform(0.2, 0.8)), 2) if kind == "trace" else 0.0,
    )


def _with_random_histogram(rng: np.random.Generator, p: Stream) -> Stream:
    """The point with rows looked up exp(N(log m, s**2)) times, for random m and s.

    The point as it was where its lookups do not suffice for one such row.
    """
    median = np.exp(rng.uniform(0, np.log(max(1.0, p.lookups / 4))))
    times = rng.lognormal(np.log(median), rng.uniform(0, MAX_SIGMA), DRAWN_ROWS)
    times = np.clip(np.round(times), 1, p.lookups)
    unique = min(p.rows, max(1, round(p.lookups / float(times.mean()))))
    shares = parse_histogram(histogram_text(histogram(times)))
    unique = min(unique, int(p.lookups / float(shares @ LEAST)))  # all bins have room for lookups
    return replace(p, unique=unique, reuse=histogram_text(shares)) if unique else p


def draw_rows(p: Stream, device: str) -> Tensor:
    """Random row numbers (lookups,) of the point's stream, int64 on the device."""
    if not p.reuse:
        return zipf_indices(p, device)
    rng = np.random.default_rng(int(torch.randint(2**31, ()).item()))
    index = draw_indices(rng, p.rows, p.lookups, p.unique, parse_histogram(p.reuse))
    return torch.tensor(index, device=device)


def bag_starts(p: Stream) -> np.ndarray:
    """Starts of bags whose lengths have the mean lookups / bags and the relative ``spread``."""
    if not p.spread:
        return np.asarray(np.arange(p.bags) * p.lookups // p.bags)
    rng = np.random.default_rng(int(torch.randint(2**31, ()).item()))
    variance = np.log1p(p.spread**2)
    ends = np.cumsum(rng.lognormal(-variance / 2, np.sqrt(variance), p.bags))
    whole = np.floor(ends / ends[-1] * p.lookups + 0.5).astype(np.int64)
    return np.asarray(np.concatenate([[0], whole[:-1]]))


def draw_stream(p: Stream, device: str) -> tuple[Tensor, Tensor]:
    """Row numbers (lookups,) and the starts (bags,) of bags, int64 on the device."""
    starts = torch.tensor(bag_starts(p), device=device)
    return draw_rows(p, device), starts


def zipf_indices(p: Stream, device: str) -> Tensor:
    """Random row numbers with P(rank r) ~ r**-skew; popular rows are scattered over the table.

    Drawn on the device by the inverse of the continuous distribution on [1/2, rows + 1/2].
    """
    u = torch.rand(p.lookups, dtype=torch.float64, device=device)
    low, high, power = 0.5, p.rows + 0.5, 1 - p.skew
    if abs(power) < 1e-6:
        x = low * (high / low) ** u
    else:
        x = (low**power + u * (high**power - low**power)) ** (1 / power)
    rank = x.round().long().clamp(1, p.rows)
    if p.repeats:
        back = torch.randint(1, RECENT + 1, rank.shape, device=device)
        at = (torch.arange(p.lookups, device=device) - back).clamp(min=0)
        rank = torch.where(torch.rand(rank.shape, device=device) < p.repeats, rank[at], rank)
    scattered: Tensor = rank * scatter_factor(p.rows) % p.rows
    return scattered


def unique_rows(p: Stream) -> Numbers:
    """Distinct rows that a call looks up: as stated, else as expected of its skew and repeats."""
    return reuse_of(p)[0]


def row_bytes_from_memory(p: Stream, row_bytes: Numbers, cache_bytes: Numbers) -> Values:
    """Bytes whose streaming from memory takes as long as reading the rows of all lookups.

    Rows are whole lines of 64 bytes. A lookup whose row the last cache holds counts ``HIT_COST``.
    """
    line_bytes = LINE_BYTES * np.ceil(row_bytes / LINE_BYTES)
    cached_rows = HOLDS_ROWS * cache_bytes / line_bytes
    hits = expected_hit_frac(p.rows, p.lookups, p.skew, p.repeats, cached_rows)
    if np.any(np.not_equal(p.reuse, "")):
        hits = np.where(
            np.not_equal(p.reuse, ""), hit_frac(p.lookups, *reuse_of(p), cached_rows), hits
        )
    return p.lookups * line_bytes * (1 - (1 - HIT_COST) * hits)


def table_features(p: Stream, row_bytes: Numbers, cache_bytes: Numbers) -> dict[str, Numbers]:
    """How many tables follow each other, and all their lookups over the size of the last cache."""
    return {
        "log_tables": np.log2(p.tables),
        "log_lookups_per_cache": np.log2(p.tables * p.lookups * row_bytes / cache_bytes),
    }


def stream_features(p: Stream, row_bytes: Numbers, cache_bytes: Numbers) -> dict[str, Numbers]:
    """How often rows are reused, and the lookups that hit the last cache.

    ``rows_to_4`` is the share of touched rows that are looked up at most 4 times.
    """
    unique, shares = reuse_of(p)
    cumulated = np.cumsum(shares, axis=-1)
    line_bytes = LINE_BYTES * np.ceil(row_bytes / LINE_BYTES)
    return {
        "unique_frac": unique / p.rows,
        "log_reuse": np.log2(p.lookups / unique),
        **{f"rows_to_{int(MOST[i])}": cumulated[..., i] for i in SHOWN_BINS},
        "hit_frac": hit_frac(p.lookups, unique, shares, cache_bytes / line_bytes),
        "log_table_per_cache": np.log2(p.rows * row_bytes / cache_bytes),
        "log_touched_per_cache": np.log2(unique * row_bytes / cache_bytes),
    }
