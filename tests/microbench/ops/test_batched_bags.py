"""Embedding bags of many tables in one call: counts by hand, FBGEMM's results where it loads."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import islice

import pytest

from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops.lookup import batched_bags
from itercast.microbench.ops.lookup.batched_bags import BatchedBags
from itercast.microbench.sweep.rows import failure

# 3 tables of 10 rows and 4 columns; 2 bags of 6 lookups in each touch 3 rows 1, 2 and 3 times
SOME = BatchedBags(
    op="forward",
    tables=3,
    rows=10,
    dim=4,
    bags=2,
    lookups=6,
    unique=3,
    reuse="0.3333 0.3333 0.3333",
)


def test_counts_by_hand() -> None:
    """Forward: 6 rows read, 2 written of 16 bytes; backward: 6 read, 3 read and written."""
    assert batched_bags.flops(SOME) == 3 * 6 * 4
    assert batched_bags.bytes_moved(SOME) == 3 * ((6 + 2) * 16 + 8 * (6 + 2))
    backward = replace(SOME, op="sgd")
    assert batched_bags.flops(backward) == 2 * 3 * 6 * 4
    assert batched_bags.bytes_moved(backward) == 3 * ((6 + 2 * 3) * 16 + 8 * (6 + 2))


def test_tables_share_the_cache() -> None:
    gpu = load_gpu("h100-sxm-80gb")
    one, many = (batched_bags.features(replace(SOME, tables=n), gpu) for n in (1, 8))
    assert many["log_table_per_cache"] - one["log_table_per_cache"] == pytest.approx(3)


def test_a_sweep_has_all_ops() -> None:
    points = list(islice(batched_bags.sweep(), 100))
    assert {p.op for p in points} == set(batched_bags.OPS)
    assert max(p.tables * p.rows * p.dim for p in points) <= batched_bags.MAX_ELEMENTS


def test_without_fbgemm_a_point_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    with pytest.raises(NotImplementedError, match=r"itercast\[fbgemm\]") as raised:
        batched_bags.build(SOME, "cpu")
    assert failure(raised.value)["status"] == "unsupported"


@pytest.mark.parametrize("op", batched_bags.OPS)
def test_fbgemm_runs_what_is_described(op: str) -> None:
    """Pooled vectors of both bags of all tables; a backward pass runs twice."""
    pytest.importorskip("fbgemm_gpu", reason="FBGEMM is not installed", exc_type=ImportError)
    workload = batched_bags.build(replace(SOME, op=op), "cpu")
    found = workload.run()
    if op == "forward":
        assert tuple(found.shape) == (2, 3 * 4)  # type: ignore[attr-defined]
    else:
        workload.run()
