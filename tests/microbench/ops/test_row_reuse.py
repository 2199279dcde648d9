"""Reuse histograms of index streams: counted by hand, expected of a skew, and drawn."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from itercast.microbench.hardware.spec import Gpu, gpu_names, load_gpu
from itercast.microbench.ops.lookup import reuse, sparse_update
from itercast.microbench.ops.lookup.embedding_bag import (
    EmbeddingBag,
    bytes_moved,
    cached_bytes,
    features,
)
from itercast.microbench.ops.lookup.random_streams import HIT_COST, HOLDS_ROWS, draw_stream

TOY = Gpu(name="toy", sm_count=4, peak_flops_per_s={"fp32": 1e12}, l2_bytes=64 * 100)


def test_a_histogram_by_hand() -> None:
    """Rows looked up 1, 2, 3, 4 and 70,000 times; a row that was not looked up does not count."""
    shares = reuse.histogram([1, 2, 3, 4, 70000, 0])
    assert shares[:3].tolist() == [0.2, 0.2, 0.4]  # once, twice, 3 to 4 times
    assert shares[16] == 0.2 and shares.sum() == 1.0


def test_a_histogram_is_written_and_read() -> None:
    assert reuse.histogram_text([0.5, 0.25, 0, 0.25, *[0.0] * 13]) == "0.5 0.25 0 0.25"
    assert reuse.parse_histogram("2 1 0 1")[:4].tolist() == [0.5, 0.25, 0.0, 0.25]


@pytest.mark.parametrize("wrong", ["", "a b", "0 0", "-1 2", "nan 1", " ".join(["1"] * 18)])
def test_other_texts_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="1 to 17 shares"):
        reuse.parse_histogram(wrong)


def test_hits_of_a_cache_by_hand() -> None:
    """10 rows: 8 looked up once, 2 looked up 4 times; a cache of 1 row keeps one of the two."""
    shares = reuse.histogram([1] * 8 + [4, 4])
    for cache_rows, hits in ((0, 0), (1, 3), (2, 6), (100, 6)):  # 4 lookups, the first misses
        assert reuse.hit_frac(16, 10, shares, cache_rows) == pytest.approx(hits / 16)


@pytest.mark.parametrize(
    ("rows", "lookups", "skew"),
    [(1000, 4000, 0.0), (100000, 50000, 1.05), (20, 100000, 0.8), (1000000, 200000, 1.3)],
)
def test_expected_reuse_agrees_with_drawn_indices(rows: int, lookups: int, skew: float) -> None:
    weight = np.arange(1, rows + 1, dtype=float) ** -skew
    rng = np.random.default_rng(0)
    counts = np.bincount(rng.choice(rows, lookups, p=weight / weight.sum()))
    unique, shares = reuse.expected_reuse(rows, lookups, skew, 0.0)
    assert unique == pytest.approx((counts > 0).sum(), rel=0.05)
    coarse = np.cumsum(shares)[::4], np.cumsum(reuse.histogram(counts))[::4]
    assert coarse[0] == pytest.approx(coarse[1], abs=0.03)


def test_bytes_of_a_lookup_behind_a_cache_by_hand() -> None:
    """16 lookups of rows of 128 bytes: 8 rows once, 2 rows 4 times; 2 bags.

    A cache of 64 * 100 bytes holds 0.9 * 50 = 45 rows: the 6 repeated lookups hit. A dense gradient
    reads and writes a row per lookup.
    """
    p = EmbeddingBag(
        op="forward", rows=50, dim=32, bags=2, lookups=16, unique=10, reuse="0.8 0 0.2"
    )
    assert bytes_moved(p) == (16 + 2) * 128 + 8 * (16 + 2)
    assert cached_bytes(p, TOY) == pytest.approx((10 + 6 * HIT_COST + 2) * 128 + 8 * (16 + 2))
    saved = 6 * (1 - HIT_COST) * 128
    back = replace(p, op="backward")
    assert cached_bytes(back, TOY) == pytest.approx(bytes_moved(back) - 2 * saved)
    tiny = replace(TOY, l2_bytes=2 * 128 / HOLDS_ROWS / 2)  # holds one row: 3 lookups hit
    assert bytes_moved(p) - cached_bytes(p, tiny) == pytest.approx(saved / 2)


@pytest.mark.parametrize("rows, lookups", [(40, 2_000_000), (50_000, 9000), (40_000_000, 200_000)])
def test_more_reuse_is_never_slower_on_any_gpu(rows: int, lookups: int) -> None:
    """Neither a larger skew nor more repeats, for lookups, gradients and updates of tables."""
    for name in gpu_names():
        gpu = TOY if name == "cpu" else load_gpu(name)
        for change in ("skew", "repeats"):
            values = np.arange(0, 10, 0.25) if change == "skew" else np.arange(0, 1, 0.05)
            known = {"skew": 0.7, "repeats": 0.3, change: values}
            stream = {
                **{k: np.broadcast_to(v, len(values)) for k, v in known.items()},
                **{"rows": rows, "lookups": lookups, "dim": 64, "bags": 500, "unique": 0},
                **{"reuse": "", "dtype": "fp32", "weighted": False},
            }
            for op, formula in (
                ("forward", cached_bytes),
                ("backward", cached_bytes),
                ("sgd", sparse_update.cached_bytes),
                ("adam", sparse_update.cached_bytes),
            ):
                found = formula(SimpleNamespace(op=op, **stream), gpu)  # type: ignore[arg-type]
                assert np.all(np.diff(found) <= 1e-9 * found[0]), (name, op, change)
                assert rows == 40 or found[-1] < found[0]  # 40 rows are in any cache


@pytest.mark.parametrize("text", ["1", "0.9 0.1", "0.5 0.2 0.1 0.1 0 0 0.1", "0 0 0 0 0 1"])
def test_a_drawn_stream_has_its_histogram(text: str) -> None:
    """Of 3,000 lookups of a table of 5,000 rows, in bags of uneven length."""
    shares = reuse.parse_histogram(text)
    unique = int(3000 / (shares @ (reuse.LEAST + np.minimum(reuse.MOST, 64))) * 2)
    p = EmbeddingBag(
        op="forward",
        rows=5000,
        dim=4,
        bags=600,
        lookups=3000,
        unique=unique,
        reuse=text,
        spread=0.5,
    )
    torch.manual_seed(0)
    index, starts = (t.numpy() for t in draw_stream(p, "cpu"))
    counts = np.bincount(index, minlength=5000)
    assert len(index) == 3000 and (counts > 0).sum() == unique and len(counts) == 5000
    lengths = np.diff([*starts, 3000])
    assert starts[0] == 0 and lengths.min() >= 0 and len(lengths) == 600
    assert lengths.std() / lengths.mean() == pytest.approx(0.5, rel=0.2)
    assert reuse.histogram(counts) == pytest.approx(shares, abs=0.05)


def test_features_know_the_stated_stream() -> None:
    """16 lookups of 10 rows, of which a cache of 100 lines of 64 bytes holds all."""
    stated = {"op": "forward", "rows": 50, "dim": 4, "bags": 4, "lookups": 16, "dtype": "fp32"}
    p = EmbeddingBag(**stated, unique=10, reuse="0.8 0 0.2")  # type: ignore[arg-type]
    found = features(p, TOY)
    assert found["log_reuse"] == pytest.approx(np.log2(1.6))
    assert found["unique_frac"] == pytest.approx(0.2)
    assert found["rows_to_1"] == pytest.approx(0.8) and found["rows_to_4"] == pytest.approx(1.0)
    assert found["hit_frac"] == pytest.approx(6 / 16)
    skewed = EmbeddingBag(**stated, skew=1.0)  # type: ignore[arg-type]
    both = SimpleNamespace(
        **{
            name: np.array(
                [getattr(p, name), getattr(skewed, name)], dtype=object if text else None
            )
            for name, text in ((n, isinstance(getattr(p, n), str)) for n in p.__slots__)
        }
    )
    columns = features(both, TOY)
    for name in ("log_reuse", "hit_frac", "unique_frac", "rows_to_1"):
        one = features(skewed, TOY)[name]
        assert columns[name].tolist() == pytest.approx([float(found[name]), float(one)])
