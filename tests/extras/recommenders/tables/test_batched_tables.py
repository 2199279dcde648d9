"""Tables that one kernel looks up and another updates: bytes by hand, laws over ranks."""

from itertools import count

import pytest

from itercast.capture.opcall import StepCapture
from itercast.compose.capture_model import capture
from itercast.compose.predict import predict
from itercast.extras.recommenders.sharded_model import Shard, Table
from itercast.extras.recommenders.tables.batched_tables import (
    MODULE,
    BatchedStep,
    as_stored,
    batched_calls,
    bytes_of_lookups,
)
from itercast.extras.recommenders.tables.captured import CapturedTable, Lookup, captured_tables
from itercast.extras.recommenders.tables.placement import Placement, Sharding
from itercast.extras.recommenders.tables.rank_step import rank_step
from itercast.microbench.hardware.stack import TableSoftware, load_stack

Held = tuple[Shard, Lookup]
HUGECTR = load_stack("hugectr").tables
RANKS = 4
ALL = tuple(range(RANKS))


def held(rows: int = 1000, columns: int = 32, pooling: float = 5.0, local: bool = False) -> Held:
    """A shard of a table of 64 columns, vectors sent in fp16, 8 samples a rank."""
    table = Table(name="t", rows=1000, dim=64, pooling=pooling, sent="fp16", index="int32")
    return Shard(0, 0, 0, rows, 0, columns, local), Lookup(call=0, samples=8, table=table)


def test_bytes_of_a_shard_by_hand() -> None:
    """Half the columns for 4 * 8 samples with 5 lookups each: 160 rows of 128 B.

    Row numbers of 4 B; vectors of 32 fp16. Sorting: 4 passes over two numbers of 4 B, there and
    back. Of 1,000 rows, 160 lookups touch 1,000 * (1 - 0.999**160) = 148.
    """
    found = bytes_of_lookups(*held(), RANKS, "sgd")
    assert found["read"] == 160 * (128 + 4)
    assert found["written"] == 32 * 64
    assert found["sorted"] == 160 * 8 * 4 * 2
    assert found["gradients"] == 160 * 64
    assert found["updated"] == pytest.approx(2 * 148 * 128, rel=0.01)
    adam = bytes_of_lookups(*held(), RANKS, "adamw")
    assert adam["updated"] == pytest.approx(3 * found["updated"])
    copy = bytes_of_lookups(*held(local=True), RANKS, "sgd")
    assert copy["read"] == found["read"] / RANKS  # of its own samples alone


def test_one_kernel_moves_what_its_shards_move() -> None:
    """The lookup is one call and the update another, with the bytes of both shards."""
    two = [held(), held(rows=500, columns=64)]
    each = [batched_calls([one], RANKS, "sgd", count()) for one in two]
    forward, (update,) = batched_calls(two, RANKS, "sgd", count())
    assert forward.args[0].nbytes == sum(f.args[0].nbytes for f, _ in each)
    assert forward.outputs[0].nbytes == sum(f.outputs[0].nbytes for f, _ in each)
    assert update.args[0].nbytes == pytest.approx(sum(b[0].args[0].nbytes for _, b in each), abs=2)
    assert batched_calls(two, RANKS, "none", count())[1] == ()


def tables_of(step: StepCapture) -> tuple[CapturedTable, ...]:
    return as_stored(captured_tables(step), HUGECTR)


def steps(step: StepCapture, sharding: Sharding) -> list[StepCapture]:
    """The steps of all ranks."""
    return [
        rank_step(step, tables_of(step), sharding, r, RANKS, 2, on_cpu=False, kind=BatchedStep)
        for r in ALL
    ]


def kernels(step: StepCapture, phase: str) -> list[int]:
    """Bytes read by the kernels over all tables."""
    return [c.args[0].nbytes for c in step.calls if c.module == MODULE and c.phase == phase]


def test_all_ranks_look_up_what_one_process_does() -> None:
    """Tables cut in any way read the rows that whole tables read; a lookup is one kernel."""
    step = capture("dlrm-dcn-s", optimizer="sgd", dtype="fp16")
    count_ = len(tables_of(step))
    whole = steps(step, (Placement("table_wise", (0,)),) * count_)
    assert [len(kernels(s, "forward")) for s in whole] == [1, 0, 0, 0]
    for place in (Placement("column_wise", ALL), Placement("grid_shard", ALL)):
        cut = steps(step, (place,) * count_)
        assert all(len(kernels(s, "forward")) == len(kernels(s, "optimizer")) == 1 for s in cut)
        rows = sum(kernels(s, "forward")[0] for s in cut)
        numbers = 4 * sum(t.lookups[0].samples * t.table.pooling for t in tables_of(step)) * RANKS
        once = kernels(whole[0], "forward")[0] - numbers
        again = {"column_wise": RANKS, "grid_shard": 2}[place.kind]  # row numbers per lookup
        assert rows - again * numbers == pytest.approx(once, rel=0.02)


def test_copies_are_reduced_with_the_dense_part_and_send_nothing() -> None:
    step = capture("dlrm-dcn-s", optimizer="sgd", dtype="fp16")
    found = steps(step, (Placement("data_parallel", ALL),) * len(tables_of(step)))
    assert all(s == found[0] for s in found[1:])
    assert not any("collective" in c.op for c in found[0].calls)
    shards = [p for p in found[0].parameters if p.name.startswith("shard_")]
    assert len(shards) == len(tables_of(step))
    assert all(found[0].calls[p.ready_after].module == MODULE for p in shards)


def test_vectors_travel_in_the_models_dtype_and_tables_stay_in_fp32() -> None:
    tables = tables_of(capture("dlrm-dcn-s", dtype="fp16"))
    assert {(t.table.dtype, t.table.sent_bytes, t.table.index) for t in tables} == {
        ("fp32", 2, "int32")
    }
    plain = as_stored(tables, TableSoftware())
    assert plain[0].table.index == "int64" and plain[0].table.lengths


def test_fewer_kernels_are_faster() -> None:
    """Software alone: HugeCTR's step of MLPerf's DLRM takes less time than torch's."""
    how = {"gpu": "h100-sxm-80gb", "engine": "compile+graph", "dtype": "fp16", "batch": 6912}
    times = [
        predict("dlrm-mlperf", plan="dp=8,shard=greedy", stack=stack, **how).iteration_us
        for stack in ("hugectr", "")
    ]
    assert times[0] < times[1]
