"""How often a batch looks up each row of a table: reuse histograms, and index streams of them.

A histogram has 17 bins: shares of the touched rows that are looked up 1, 2, 3 to 4, 5 to 8, ...
times in one batch; the last bin is above 2**15 times. Source: arXiv 2404.12674, section IV.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from itercast.capture.base.slow_imports import pd

BINS = 17
RANK_BINS = 24
LAST = 2.0**17  # times that a row of the last bin is looked up at most
LEAST = np.concatenate([[1.0], 2.0 ** np.arange(BINS - 1) + 1])  # times, by bin
MOST = np.concatenate([2.0 ** np.arange(BINS - 1), [LAST]])
DIGITS = 4  # of the shares in a text
POISSON_TERMS = 4  # counts up to which the Poisson distribution is summed exactly
LOGISTIC = 1.702  # no assumption: logistic slope nearest to the normal distribution function
CHUNK = 8192  # rows of a table of parameters whose histograms are expected at once


def histogram(counts: ArrayLike) -> np.ndarray:
    """Shares (17,) of rows by how often each is looked up; rows with a count of 0 are left out."""
    counts = np.asarray(counts)
    counts = counts[counts > 0]
    bins = np.minimum(np.ceil(np.log2(counts)).astype(int), BINS - 1)
    return np.asarray(np.bincount(bins, minlength=BINS) / max(1, len(counts)))


def histogram_text(shares: np.ndarray) -> str:
    """A histogram as text: shares by bin, with a space between, without zeros at the end."""
    rounded = [f"{float(s):.{DIGITS}f}".rstrip("0").rstrip(".") for s in shares]
    while rounded and rounded[-1] == "0":
        rounded.pop()
    return " ".join(rounded)


def parse_histogram(text: str) -> np.ndarray:
    """The shares (17,) of a text, scaled to a sum of 1; ValueError where it is no histogram."""
    try:
        shares = [float(word) for word in text.split()]
    except ValueError:
        shares = []
    good = 0 < len(shares) <= BINS and min(shares) >= 0 and np.isfinite(shares).all()
    if not good or sum(shares) <= 0:
        raise ValueError(f"reuse {text[:60]!r}: 1 to {BINS} shares of at least 0, not all 0")
    padded = np.zeros(BINS)
    padded[: len(shares)] = shares
    return np.asarray(padded / padded.sum())


def times_by_bin(lookups: ArrayLike, unique: ArrayLike, shares: ArrayLike) -> np.ndarray:
    """Estimate how often a row of each bin is looked up on average, shape (n, 17).

    mean[b] = LEAST[b] + f * (MOST[b] - LEAST[b]), with the one f (0 to 1) for all bins that gives
    unique * sum(shares * mean) = lookups. ``shares`` (n, 17) is the histogram.
    """
    wanted = np.asarray(lookups, dtype=float) / np.maximum(1.0, np.asarray(unique, dtype=float))
    low, high = (np.asarray(shares) * bound for bound in (LEAST, MOST))
    room = (high - low).sum(axis=-1)
    place = (wanted - low.sum(axis=-1)) / np.where(room > 0, room, 1.0)
    return np.asarray(LEAST + np.clip(place, 0.0, 1.0)[..., None] * (MOST - LEAST))


def hit_frac(
    lookups: ArrayLike, unique: ArrayLike, shares: ArrayLike, cache_rows: ArrayLike
) -> np.ndarray:
    """Share of lookups that find their row in a cache of ``cache_rows`` rows.

    The cache keeps the rows that are looked up most; the first lookup of each row misses.
    """
    unique = np.asarray(unique, dtype=float)
    times = times_by_bin(lookups, unique, shares)
    rows = unique[..., None] * np.asarray(shares)
    hotter = rows[..., ::-1].cumsum(axis=-1)[..., ::-1] - rows
    kept = np.clip(np.asarray(cache_rows, dtype=float)[..., None] - hotter, 0.0, rows)
    again = (rows * (times - 1)).sum(axis=-1)  # lookups but the first of a row
    share = (kept * (times - 1)).sum(axis=-1) / np.where(again > 0, again, 1.0)
    return np.asarray(share * (1 - unique / np.asarray(lookups, dtype=float)))


def expected_hit_frac(
    rows: ArrayLike, lookups: ArrayLike, skew: ArrayLike, repeats: ArrayLike, cache_rows: ArrayLike
) -> np.ndarray:
    """``hit_frac`` of lookups drawn as in ``expected_reuse``; a larger skew never lowers it.

    The ``cache_rows`` likeliest rows miss once, if they are drawn: 1 - (1 - p)^n of n drawn. All
    others miss whenever they are drawn: n * p. A repeated lookup hits.
    """
    columns = (rows, lookups, skew, repeats, cache_rows)
    arrays = np.broadcast_arrays(*(np.asarray(c, dtype=float) for c in columns))
    missed = [
        _missed(*(a.reshape(-1, 1)[start : start + CHUNK] for a in arrays))
        for start in range(0, arrays[0].size, CHUNK)
    ]
    return 1 - np.concatenate(missed).reshape(arrays[0].shape)


def _missed(
    rows: np.ndarray,
    lookups: np.ndarray,
    skew: np.ndarray,
    repeats: np.ndarray,
    cache_rows: np.ndarray,
) -> np.ndarray:
    """Share (n,) of lookups that miss; arguments are columns (n, 1), as of ``expected_hit_frac``.

    The cache keeps the likeliest ``cache_rows`` rows. Sums run over bins of ranks (``_drawn``): the
    rows of a bin, the chance of one row per draw, the draws, and the chance that a row is drawn at
    all.
    """
    width, chance, drawn, seen = _drawn(rows, lookups, skew, repeats)
    kept = np.clip(cache_rows - (np.cumsum(width, axis=-1) - width), 0.0, width)
    missed = (kept * seen + (width - kept) * drawn * chance).sum(axis=-1)
    return np.asarray(np.minimum(missed / lookups[:, 0], 1.0))


def rows_outside(p: Any, cached_rows: ArrayLike) -> np.ndarray:
    """Distinct rows of a call that a cache of the table's ``cached_rows`` hottest rows lacks.

    The cache has them before the call. Where the call's reuse is stated, rows that it looks up
    several times are the hottest, and those looked up once are any of the others.
    """
    columns = (p.rows, p.lookups, p.skew, p.repeats, cached_rows)
    rows, lookups, skew, repeats, kept_rows = (
        np.atleast_1d(np.asarray(c, dtype=float))[:, None] for c in columns
    )
    if not np.any(np.not_equal(p.reuse, "")):
        width, _, _, seen = _drawn(rows, lookups, skew, repeats)
        kept = np.clip(kept_rows - (np.cumsum(width, axis=-1) - width), 0.0, width)
        return np.asarray(((width - kept) * seen).sum(axis=-1))
    unique, shares = reuse_of(p)
    touched = np.atleast_1d(unique)[:, None] * np.atleast_2d(shares)
    hotter = touched[:, ::-1].cumsum(axis=-1)[:, ::-1] - touched
    lacking = touched - np.clip(kept_rows - hotter, 0.0, touched)
    once = np.clip((kept_rows - hotter[:, :1]) / (rows - hotter[:, :1]), 0.0, 1.0)
    return np.asarray(lacking[:, 1:].sum(axis=-1) + touched[:, 0] * (1 - once[:, 0]))


def expected_reuse(
    rows: ArrayLike, lookups: ArrayLike, skew: ArrayLike, repeats: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Expected distinct rows (n,) and histogram (n, 17) of lookups drawn with P(r) ~ r**-skew.

    A row of chance p is drawn Poisson(lookups * p) times. A share ``repeats`` of the lookups
    repeats an earlier one: lookups * (1 - repeats) are drawn, and each stands for 1 / (1 -
    repeats). Ranks are summed in bins of equal width in log r, so that the cost does not grow
    with the table.
    """
    columns = (rows, lookups, skew, repeats)
    arrays = np.broadcast_arrays(*(np.asarray(c, dtype=float) for c in columns))
    shape, flat = arrays[0].shape, [a.reshape(-1) for a in arrays]
    unique, shares = np.empty(flat[0].size), np.empty((flat[0].size, BINS))
    for start in range(0, flat[0].size, CHUNK):
        part = slice(start, start + CHUNK)
        unique[part], shares[part] = _expected(*(a[part, None] for a in flat))
    return unique.reshape(shape), shares.reshape(*shape, BINS)


def _chances(rows: np.ndarray, skew: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of rows (n, bins) in bins of about equal width in log rank, and one row's chance."""
    steps = np.arange(RANK_BINS + 1) / RANK_BINS
    ends = np.floor(0.5 * (2 * rows + 1) ** steps + 1e-9 + 0.5) - 1  # from 0 to rows
    ends[:, 0], ends[:, -1:] = 0.0, rows
    width = np.diff(ends)
    weight = np.sqrt((ends[:, :-1] + 1) * np.maximum(ends[:, 1:], 1.0)) ** -skew
    return width, weight / (width * weight).sum(axis=-1, keepdims=True)


def _drawn(
    rows: np.ndarray, lookups: np.ndarray, skew: np.ndarray, repeats: np.ndarray
) -> tuple[np.ndarray, ...]:
    """As ``_chances``, with the number of draws and each row's chance to be drawn at all."""
    width, chance = _chances(rows, skew)
    drawn, chance = np.maximum(1.0, lookups * (1 - repeats)), np.minimum(chance, 1 - 1e-12)
    return width, chance, drawn, -np.expm1(drawn * np.log1p(-chance))


def _expected(
    rows: np.ndarray, lookups: np.ndarray, skew: np.ndarray, repeats: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """As ``expected_reuse``, of columns (n, 1); ``below``: P(1 <= lookups <= end of bin)."""
    width, chance, drawn, seen = _drawn(rows, lookups, skew, repeats)
    mean = drawn * chance
    unique = np.minimum((width * seen).sum(axis=-1), np.minimum(rows, drawn)[:, 0])
    upper = MOST[:-1] * (1 - repeats)
    below = _poisson_cdf(mean[..., None], upper[:, None, :]) - (1 - seen)[..., None]
    touched = np.clip((width[..., None] * below).sum(axis=1), 0.0, None)
    total = (width * seen).sum(axis=-1, keepdims=True)
    cumulated = np.minimum(np.concatenate([touched, total], axis=-1) / total, 1.0)
    return unique, np.clip(np.diff(cumulated, axis=-1, prepend=0.0), 0.0, 1.0)


def _poisson_cdf(mean: np.ndarray, most: np.ndarray) -> np.ndarray:
    """P(N <= most) of a Poisson variable: summed for few, else Wilson and Hilferty's cube root.

    Source: doi:10.1073/pnas.17.12.684 with the normal distribution function as a logistic one.
    """
    count = np.floor(most) + 1
    z = ((mean / count) ** (1 / 3) - (1 - 1 / (9 * count))) * 3 * np.sqrt(count)
    cube = 1 / (1 + np.exp(np.clip(LOGISTIC * z, -60, 60)))
    term = np.exp(-np.minimum(mean, 700.0))
    exact = term.copy()
    for n in range(1, POISSON_TERMS + 1):
        term = term * mean / n
        exact = exact + np.where(n <= most, term, 0.0)
    return np.asarray(np.where(most <= POISSON_TERMS, exact, cube))


def reuse_of(p: Any) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows (n,) and histogram (n, 17) of calls: stated ones, else expected from skew."""
    texts = np.asarray(p.reuse, dtype=object)
    unique, shares = expected_reuse(p.rows, p.lookups, p.skew, p.repeats)
    if not np.any(texts != ""):
        return unique, shares
    codes, names = pd.factorize(texts.reshape(-1))
    known = np.array([parse_histogram(n) if n else np.full(BINS, np.nan) for n in names])
    stated = known[codes].reshape(*texts.shape, BINS)
    is_stated = ~np.isnan(stated[..., 0])
    limit = np.minimum(np.asarray(p.rows, dtype=float), p.lookups)
    unique = np.where(is_stated, np.minimum(p.unique, limit), unique)
    return np.maximum(unique, 1.0), np.where(is_stated[..., None], stated, shares)


def draw_counts(
    rng: np.random.Generator, lookups: int, unique: int, shares: np.ndarray
) -> np.ndarray:
    """Times (unique,) that each touched row is looked up, hottest bin first; sum ``lookups``.

    Within a bin they are spread evenly around the mean of ``times_by_bin``.
    """
    ends = np.floor(np.cumsum(np.asarray(shares) / np.sum(shares)) * unique + 0.5).astype(int)
    rows, means = np.diff(ends, prepend=0), times_by_bin(lookups, unique, shares)
    spread = np.minimum(means - LEAST, MOST - means)
    drawn = [rng.uniform(m - s, m + s, n) for m, s, n in zip(means, spread, rows, strict=True)]
    more = np.concatenate(drawn[::-1]) - 1  # beyond the first
    more = more if more.any() else more + 1
    more *= (lookups - unique) / more.sum()
    counts = np.floor(more).astype(int)
    left = lookups - unique - int(counts.sum())
    counts[np.argsort(counts - more, kind="stable")[:left]] += 1
    return np.asarray(1 + counts)


def draw_indices(
    rng: np.random.Generator, rows: int, lookups: int, unique: int, shares: np.ndarray
) -> np.ndarray:
    """Row numbers (lookups,) of this histogram in random order; hot rows are anywhere."""
    counts = draw_counts(rng, lookups, unique, shares)
    rank = np.repeat(np.arange(unique), counts)
    rng.shuffle(rank)
    return rank * scatter_factor(rows) % rows


def scatter_factor(rows: int) -> int:
    """A factor without a common divisor with ``rows``: products modulo rows are a permutation."""
    # no assumption: the golden ratio
    return next(f for f in range(int(0.618 * rows) + 1, 2 * rows + 1) if gcd(f, rows) == 1)
