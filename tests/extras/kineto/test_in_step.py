"""Ops that are measured inside profiled training steps."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from itercast.capture.cases.registry import case
from itercast.capture.recorder.log import capture_step
from itercast.extras.kineto.in_step import STEPS, measure_in_step
from itercast.microbench.iterations import worker
from itercast.microbench.iterations.measure import Iteration
from itercast.microbench.iterations.worker import IterationOrder
from itercast.microbench.ops import find_family
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.store import read_journal
from itercast.microbench.timing.traces import Span, Trace, host_times


@pytest.mark.parametrize("name", ["mlp-s", "gpt-s", "resnet-s"])
def test_products_of_a_profiled_step_are_those_of_its_capture(name: str) -> None:
    """As many of each size; times are positive."""
    chosen = case(name)
    asked = Iteration(case=name, batch=chosen.batch, seq=chosen.seq)
    step, rows = measure_in_step(chosen, asked, "cpu")
    sizes = ("op", "m", "n", "k", "batch")
    found = Counter[tuple[Any, ...]]()
    for row in rows["gemm"]:
        found[tuple(row[n] for n in sizes)] += row["samples"] // STEPS
    captured = capture_step(
        chosen.build, lambda: chosen.inputs(chosen.batch, chosen.seq), chosen.loss, asked.settings()
    )
    products = [p for _, p in map(find_family, captured.calls) if isinstance(p, Gemm)]
    assert found == Counter(tuple(getattr(p, n) for n in sizes) for p in products)
    assert 0 < step["known_frac"] <= 1 and step["time_us"] > 0
    assert all(row["time_us"] > 0 for some in rows.values() for row in some)


def test_an_op_within_another_is_part_of_its_time() -> None:
    """A linear layer of 10 us holds a product of 8 us, which a family describes."""
    spans = [("aten::linear", 0, 10), ("aten::addmm", 1, 8), ("aten::mm", 2, 5)]
    spans.append(("aten::view", 20, 1))
    ops = [Span(name, "t", float(start), float(us), -1, {}) for name, start, us in spans]
    known = ("aten::addmm", "aten::mm")
    assert host_times(Trace(ops=ops), known.__contains__) == {1: 8.0}


def test_ops_of_steps_are_a_family_of_their_own(tmp_path: Path) -> None:
    """A row of the iteration, and a journal of its ops, none of which is a row of its family."""
    order = IterationOrder(
        root=str(tmp_path),
        run_id="run",
        device="cpu",
        gpu="toy",
        threads=1,
        ranks=1,
        repeat=0,
        iterations=(Iteration(case="mlp-s", batch=2),),
        in_step=True,
    )
    worker.run(order)
    (whole,) = read_journal(tmp_path / ".journal/run.jsonl")
    assert (whole["family"], whole["status"], whole["case"]) == ("in_step", "ok", "mlp-s")
    ops = read_journal(tmp_path / ".journal/run-ops.jsonl")
    assert {row["family"] for row in ops} == {"in_step_ops"}
    assert {row["timer"] for row in ops} == {"in_step"}
    assert {row["in_case"] for row in ops} == {"mlp-s"}
    assert sum(row["calls"] for row in ops if row["of"] == "gemm") == 8  # 3 forward, 5 backward
    assert len({row["key"] for row in ops}) == len(ops)


def test_a_step_that_cannot_be_profiled_is_a_row() -> None:
    asked = Iteration(case="mlp-s", batch=2, plan="dp=2")
    step, rows = measure_in_step(case("mlp-s"), asked, "cpu")
    assert step["status"] == "error" and "dp=2" in step["reason"] and not rows
