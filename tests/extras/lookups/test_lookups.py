"""Lookups in tables and updates of them: streams of rows, caches, what really runs."""

import gzip
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from itercast.extras.lookups import embedding_bag, reuse
from itercast.extras.lookups.embedding_bag import EmbeddingBag, bytes_moved, cached_bytes
from itercast.extras.lookups.random_streams import (
    HIT_COST,
    HOLDS_ROWS,
    draw_rows,
    draw_stream,
    unique_rows,
    zipf_indices,
)
from itercast.extras.recommenders import sparse_update
from itercast.extras.recommenders.sparse_update import SparseUpdate
from itercast.extras.recommenders.tables.index_streams import parse_indices
from itercast.microbench.hardware.spec import Gpu, gpu_names, load_gpu
from itercast.microbench.ops.family import Workload

TOY = Gpu(name="toy", sm_count=4, peak_flops_per_s={"fp32": 1e12}, l2_bytes=64 * 100)
# 6 lookups of 4 columns in a table of 10 rows, which touch 3 rows 1, 2 and 3 times
STREAM: dict[str, Any] = {"rows": 10, "dim": 4, "lookups": 6, "unique": 3}
STREAM |= {"reuse": "0.3333 0.3333 0.3333"}
UPDATE = SparseUpdate(op="sgd", **STREAM)
SIZES: dict[str, Any] = {"rows": 10, "dim": 4, "bags": 2, "lookups": 6}


def test_a_histogram_is_counted_written_and_read() -> None:
    """Rows looked up 1, 2, 3, 4 and 70,000 times; a row that was not looked up does not count."""
    shares = reuse.histogram([1, 2, 3, 4, 70000, 0])
    assert shares[:3].tolist() == [0.2, 0.2, 0.4]  # once, twice, 3 to 4 times
    assert shares[16] == 0.2 and shares.sum() == 1.0
    assert reuse.histogram_text([0.5, 0.25, 0, 0.25, *[0.0] * 13]) == "0.5 0.25 0 0.25"
    assert reuse.parse_histogram("2 1 0 1")[:4].tolist() == [0.5, 0.25, 0.0, 0.25]
    for wrong in ("", "a b", "0 0", "-1 2", "nan 1", " ".join(["1"] * 18)):
        with pytest.raises(ValueError, match="1 to 17 shares"):
            reuse.parse_histogram(wrong)


@pytest.mark.parametrize(
    ("rows", "lookups", "skew"),
    [(1000, 4000, 0.0), (100000, 50000, 1.05), (20, 100000, 0.8), (10**6, 200000, 1.3)],
)
def test_expected_reuse_agrees_with_drawn_indices(rows: int, lookups: int, skew: float) -> None:
    """Rows touched and their histogram against a draw, and against the sum over all ranks."""
    weight = np.arange(1, rows + 1, dtype=float) ** -skew
    rng = np.random.default_rng(0)
    counts = np.bincount(rng.choice(rows, lookups, p=weight / weight.sum()))
    unique, shares = reuse.expected_reuse(rows, lookups, skew, 0.0)
    assert unique == pytest.approx((counts > 0).sum(), rel=0.05)
    coarse = np.cumsum(shares)[::4], np.cumsum(reuse.histogram(counts))[::4]
    assert coarse[0] == pytest.approx(coarse[1], abs=0.03)
    p = EmbeddingBag(op="forward", dim=4, bags=1, rows=rows, lookups=lookups, skew=skew)
    exact = np.sum(1 - (1 - weight / weight.sum()) ** lookups)
    assert unique_rows(p) == pytest.approx(exact, rel=0.05)
    assert len(np.unique(zipf_indices(p, "cpu"))) == pytest.approx(exact, rel=0.1, abs=1)


def test_bytes_of_a_lookup_behind_a_cache_by_hand() -> None:
    """16 lookups of rows of 128 bytes: 8 rows once, 2 rows 4 times; 2 bags.

    A cache of 64 * 100 bytes holds 0.9 * 50 = 45 rows: the 6 repeated lookups hit. A dense gradient
    reads and writes a row per lookup.
    """
    shares = reuse.histogram([1] * 8 + [4, 4])
    for cache_rows, hits in ((0, 0), (1, 3), (2, 6), (100, 6)):  # 4 lookups, the first misses
        assert reuse.hit_frac(16, 10, shares, cache_rows) == pytest.approx(hits / 16)
    known: dict[str, Any] = {"rows": 50, "lookups": 16, "unique": 10, "reuse": "0.8 0 0.2"}
    p = EmbeddingBag(op="forward", dim=32, bags=2, **known)
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
            formulas = {"forward": cached_bytes, "backward": cached_bytes}
            formulas |= dict.fromkeys(("sgd", "adam"), sparse_update.cached_bytes)
            for op, formula in formulas.items():
                found = formula(SimpleNamespace(op=op, **stream), gpu)  # type: ignore[arg-type]
                assert np.all(np.diff(found) <= 1e-9 * found[0]), (name, op, change)
                assert rows == 40 or found[-1] < found[0]  # 40 rows are in any cache


@pytest.mark.parametrize("text", ["1", "0.9 0.1", "0.5 0.2 0.1 0.1 0 0 0.1", "0 0 0 0 0 1"])
def test_a_drawn_stream_has_its_histogram(text: str) -> None:
    """Of 3,000 lookups of a table of 5,000 rows, in bags of uneven length."""
    shares = reuse.parse_histogram(text)
    unique = int(3000 / (shares @ (reuse.LEAST + np.minimum(reuse.MOST, 64))) * 2)
    stream = {"rows": 5000, "bags": 600, "lookups": 3000, "unique": unique, "spread": 0.5}
    p = EmbeddingBag(op="forward", dim=4, reuse=text, **stream)  # type: ignore[arg-type]
    index, starts = (t.numpy() for t in draw_stream(p, "cpu"))
    counts = np.bincount(index, minlength=5000)
    assert len(index) == 3000 and (counts > 0).sum() == unique and len(counts) == 5000
    lengths = np.diff([*starts, 3000])
    assert starts[0] == 0 and lengths.min() >= 0 and len(lengths) == 600
    assert lengths.std() / lengths.mean() == pytest.approx(0.5, rel=0.2)
    assert reuse.histogram(counts) == pytest.approx(shares, abs=0.05)


@contextmanager
def calls_of(workload: Workload) -> Iterator[list[str]]:
    """Names of the ops that one run calls."""
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log():
        workload.run()
    yield seen


@pytest.mark.parametrize("op", embedding_bag.OPS)
def test_several_tables_are_looked_up_one_after_the_other(op: str) -> None:
    workload = embedding_bag.build(EmbeddingBag(op=op, tables=3, **SIZES), "cpu")
    with calls_of(workload) as seen:
        assert sum("_embedding_bag" in name for name in seen) >= 3
    assert workload.calls == 3


def test_each_of_several_tables_is_updated() -> None:
    workload = sparse_update.build(replace(UPDATE, tables=3), "cpu")
    with calls_of(workload) as seen:
        assert sum("add_" in name for name in seen) == 3
    assert workload.calls == 3


@pytest.mark.parametrize("op", sparse_update.OPS)
def test_what_is_timed_is_the_optimizer_s_step(op: str) -> None:
    """One run changes exactly the rows that the gradient touches."""
    p = replace(UPDATE, op=op, rows=50)
    index = draw_rows(p, "cpu").unsqueeze(0)
    table, gradient = sparse_update.operands(p, index, "cpu")
    before = table.detach().clone()
    sparse_update.optimizer_step(op, table, gradient)()
    assert int((table != before).any(dim=1).sum()) == 3


def test_a_timed_sparse_backward_is_autograd_s() -> None:
    """Its gradient adds up to the dense one; autograd's has a row per lookup."""
    p = EmbeddingBag(op="sparse_backward", rows=12, dim=4, bags=3, lookups=9, skew=1.0)
    gradient = embedding_bag.build(p, "cpu").run()
    assert isinstance(gradient, torch.Tensor) and gradient.is_sparse and gradient._nnz() == 9
    torch.manual_seed(0)
    dense = embedding_bag.build(replace(p, op="backward"), "cpu").run()
    assert isinstance(dense, torch.Tensor)
    assert torch.allclose(gradient.to_dense(), dense)
    bag = torch.randn(12, 4, requires_grad=True)
    F.embedding_bag(torch.tensor([1, 1]), bag, torch.tensor([0]), sparse=True).sum().backward()
    assert bag.grad is not None and bag.grad._nnz() == 2


GOOD = {"table": "users", "indices": [3, 3, 3, 1, 0], "offsets": [0, 2, 2, 5]}


def parquet(path: Path, *rows: dict[str, Any]) -> str:
    pd.DataFrame(rows).to_parquet(path / "stream.parquet")
    return str(path / "stream.parquet")


def test_facts_of_a_file_by_hand(tmp_path: Path) -> None:
    """Bags (3, 3), (), (3, 1, 0): row 3 three times, rows 1 and 0 once; lengths 2, 0, 3."""
    (stream,) = parse_indices(parquet(tmp_path, GOOD))
    facts = stream.facts(rows=4, bags=3)
    lengths = np.array([2, 0, 3])
    assert facts == {
        "lookups": 5,
        "unique": 3,
        "reuse": "0.6667 0 0.3333",
        "spread": pytest.approx(lengths.std() / lengths.mean(), abs=1e-3),
    }
    assert stream.facts(rows=4, bags=1) == {"lookups": 2, "unique": 1, "reuse": "0 1", "spread": 0}


def test_tensors_of_several_tables_are_read(tmp_path: Path) -> None:
    """Two tables of two bags: (5), (6, 7) and (1, 1), (); one file zipped, one not."""
    indices, offsets = torch.tensor([5, 6, 7, 1, 1]), torch.tensor([0, 1, 3, 5])
    whole = (indices, torch.cat([offsets, torch.tensor([5])]), torch.tensor([[1, 2], [2, 0]]))
    torch.save(whole, tmp_path / "a.pt")
    (tmp_path / "a.pt.gz").write_bytes(gzip.compress((tmp_path / "a.pt").read_bytes()))
    for name in ("a.pt", "a.pt.gz"):
        first, second = parse_indices(str(tmp_path / name))
        assert first.facts(rows=8, bags=2)["lookups"] == 3
        assert second.facts(rows=8, bags=2)["reuse"] == "0 1"


def test_words_for_streams() -> None:
    assert parse_indices("uniform")[0].facts(rows=10, bags=5) == {}
    assert parse_indices("zipf:1.05")[0].facts(rows=10, bags=5) == {"skew": 1.05}
    for other in ("zipf:", "zipf:x", "zipf:-1", "zipf:nan", "normal", ""):
        with pytest.raises(ValueError, match="indices"):
            parse_indices(other)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"indices": [3, -1, 2, 1, 0]}, "index -1 is negative"),
        ({"offsets": [0, 4, 2, 5]}, "offsets go back from 4 to 2"),
        ({"offsets": [1, 2, 5]}, "offsets go from 0 to the number of indices"),
        ({"offsets": [0, 2, 9]}, "offsets go from 0 to the number of indices"),
        ({"offsets": []}, "offsets go from 0"),
        ({"indices": [0.5, 1.0]}, "list of integers, got float64"),
        ({"indices": ["a"]}, "list of integers"),
        ({"indices": None, "offsets": [0, 0, 0]}, "no lookups in 2 bags"),
        ({"indices": [9, 1, 2, 1, 0]}, "row 9, the table has 4 rows"),
        ({"offsets": [0, 5]}, "1 bags in the file, the batch has 2"),
    ],
)
def test_hostile_streams_are_refused_in_a_line(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match="indices.*" + said) as refused:
        parse_indices(parquet(tmp_path, GOOD | changed))[0].facts(rows=4, bags=2)
    assert "\n" not in str(refused.value)


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_files_are_not_executed(tmp_path: Path) -> None:
    """Neither a pickle of other things than tensors, nor garbage, nor another number of them."""
    target = tmp_path / "executed"
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Malicious(target)))
    (tmp_path / "b.pt").write_bytes(b"garbage")
    torch.save((torch.ones(1), torch.ones(1)), tmp_path / "c.pt")
    (tmp_path / "d.parquet").write_bytes(b"garbage")
    for name in ("a.pt", "b.pt", "c.pt", "d.parquet"):
        with pytest.raises(ValueError, match=name) as refused:
            parse_indices(str(tmp_path / name))
        assert "\n" not in str(refused.value)
    assert not target.exists()
