"""A host is found from rows of its events and launches, counted by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from itercast.learners.calibrate import host_of_events


def row(op: str, time_us: float, **more: Any) -> dict[str, Any]:
    return {"family": "host", "gpu": "a10", "op": op, "time_us": time_us, **more}


# Twice the reference: 3, 2 and 4 us, and 100 + 1.35 * 20 of a step of AdamW.
EVENTS = [
    row("module_call", 6.0),
    row("view_op", 4.0),
    row("autograd_node", 8.0),
    row("adamw_step", 254.0, tensors=20),
]


def test_events_are_compared_with_those_of_the_reference() -> None:
    found = host_of_events(pd.DataFrame(EVENTS), "mine", "by hand")
    assert found is not None
    assert found.slowdown == pytest.approx(2.0)
    assert found.launch_us == pytest.approx(10.0)  # as slow as events where none was measured


def test_launches_are_measured_by_themselves_or_from_calls_of_ops() -> None:
    """7 us measured; a product's 21.6 us are 2.7 launches of 8; cold rows repeat warm ones."""
    product = {"family": "gemm", "gpu": "a10", "op": "mm", "time_us": 9.0, "launch_us": 21.6}
    calls = [{**product, "cache": "warm"}, {**product, "cache": "cold", "launch_us": 900.0}]
    failed = row("launch", 500.0, status="oom")
    rows = pd.DataFrame([*EVENTS, row("launch", 7.0), *calls, failed])
    found = host_of_events(rows.fillna({"status": "ok"}), "mine", "by hand")
    assert found is not None
    assert found.launch_us == pytest.approx(7.5)


def test_rows_of_other_families_are_no_host() -> None:
    products = pd.DataFrame([{"family": "gemm", "gpu": "a10", "op": "mm", "time_us": 9.0}])
    assert host_of_events(products, "mine", "by hand") is None
