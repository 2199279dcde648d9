"""Ops not measured in a dtype are priced as an alias that was."""

from __future__ import annotations

import pandas as pd
import pytest

from itercast.learners.bundle import SHIPPED, Bundle
from itercast.learners.calibrate import calibrate
from itercast.learners.features.op_aliases import as_measured
from itercast.microbench.ops.matrix.gemm import FAMILY


def test_products_of_a_kind_not_measured_in_their_dtype_are_those_that_were() -> None:
    """Half: plain ones; single: linear layers, whose weight is transposed; scaled ones stay."""
    ops = {"bf16": ["mm"], "fp32": ["addmm", "bmm"], "fp8": ["scaled_mm"]}
    rows = pd.DataFrame(
        {"dtype": dtype, "op": op, "layout": "nn", "m": 8, "n": 8, "k": 8}
        for dtype, op in (
            ("bf16", "addmm"),
            ("bf16", "bmm"),
            ("fp32", "mm"),
            ("fp32", "bmm"),
            ("fp8", "scaled_mm"),
            ("tf32", "addmm"),
        )
    )
    found = as_measured(rows, FAMILY, ops)
    assert found["op"].tolist() == ["mm", "mm", "addmm", "bmm", "scaled_mm", "mm"]
    assert found["layout"].tolist() == ["nn", "nn", "nt", "nn", "nn", "nn"]
    assert as_measured(rows, FAMILY, {}) is rows


def test_linear_layers_of_the_bundle_that_ships_take_as_long_as_plain_products() -> None:
    """AIConfigurator measured plain ones, and in fp8 scaled ones: an H100 knew no others."""
    facts = {"family": "gemm", "gpu": "h100-sxm-80gb", "dtype": "bf16", "layout": "nt", "batch": 1}
    rows = pd.DataFrame(
        [{**facts, "op": op, "m": 4096, "n": 1024, "k": 1024} for op in FAMILY.op_aliases]
    )
    us = Bundle.load(SHIPPED).price("gemm", rows)["predicted_us"]
    assert us.tolist() == pytest.approx([us[0]] * len(us))


def test_a_calibration_corrects_all_op_aliases() -> None:
    """Linear layers in bf16 stand as plain products: measured twice as slow, both are."""
    shipped = Bundle.load(SHIPPED)
    facts = {"family": "gemm", "gpu": "h100-sxm-80gb", "dtype": "bf16", "layout": "nt", "batch": 1}
    sizes = [{**facts, "op": "addmm", "m": m, "n": 4096, "k": 4096} for m in (1024, 2048, 4096)]
    rows = pd.DataFrame(sizes)
    before = shipped.price("gemm", rows)["predicted_us"]
    slow = calibrate(shipped, rows.assign(time_us=2 * before))
    for op in ("addmm", "mm"):
        after = slow.price("gemm", rows.assign(op=op))["predicted_us"]
        assert (after / before).between(1.7, 2.1).all()
