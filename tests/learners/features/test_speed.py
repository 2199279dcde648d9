"""Rows that are learned from: checked, at one speed, under measured names, with hosts' costs."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from itercast.extras.calibration.few_rows import calibrate_bundle
from itercast.learners.bundle import SHIPPED, SHIPPED_CPU, Bundle
from itercast.learners.features.host_calls import (
    COLD_POINTWISE,
    HostCall,
    host_call,
    learn_host_calls,
)
from itercast.learners.features.machine_speed import (
    Speed,
    at_reference_us,
    iterations_at_reference_us,
    learn_speed,
    reference_anchors,
    retest_ape_pct,
    undisturbed,
)
from itercast.learners.features.op_aliases import as_measured
from itercast.learners.features.schema import check_rows
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.memory import fused
from itercast.microbench.ops.memory.elementwise import FAMILY as ELEMENTWISE

GEMM = families()["gemm"]
EMBEDDING, EMBEDDING_BAG = families()["embedding"], families()["embedding_bag"]
ANCHORS = {("cpu", 2): (100.0, 20.0)}


def rows(
    times: list[float], anchors: list[float], serial: list[float], **more: object
) -> pd.DataFrame:
    return pd.DataFrame(
        {"time_us": times, "anchor_us": anchors, "serial_us": serial, "gpu": "cpu", "threads": 2}
    ).assign(**more)


def test_references_are_medians_and_the_product_stands_for_missing_views() -> None:
    table = rows([1.0] * 3, [90.0, 100.0, 130.0], [10.0, 20.0, np.nan])
    assert reference_anchors({"gemm": table}) == {("cpu", 2): (100.0, 20.0)}  # of 10, 20, 130


def test_long_ops_follow_the_product_short_ones_the_views() -> None:
    """Twice as slow on all threads, four times on one; 100 us runs half in parallel."""
    speed = Speed(anchors=ANCHORS, sensitivity=(1.0, 1.0))
    both = rows([100.0, 1e9, 1e-4], [200.0] * 3, [80.0] * 3)
    found = at_reference_us(both, speed)
    assert found == pytest.approx([100 / (2**0.5 * 4**0.5), 1e9 / 2, 1e-4 / 4], rel=1e-4)


def test_rows_taken_while_others_had_the_machine_are_left_out() -> None:
    """Of a slow state (2.4 times) and a stolen machine (four times, on either anchor) one stays."""
    table = rows([1.0, 2.0, 3.0], [240.0, 400.0, 100.0], [20.0, 20.0, 80.0])
    assert undisturbed(table, ANCHORS)["time_us"].tolist() == [1.0]


def test_how_much_a_family_follows_is_learned_from_points_measured_twice() -> None:
    """Sixty long products: the second time the anchor doubles and the op takes 2^0.3 as long."""
    m = np.arange(1, 61)
    sizes = {"m": m, "n": 1, "k": 1, "cache": "warm"}
    first = rows([1e6] * 60, [100.0] * 60, [20.0] * 60, **sizes, repeat=0)
    again = rows([1e6 * 2**0.3] * 60, [200.0] * 60, [20.0] * 60, **sizes, repeat=1)
    table = pd.concat([first, again], ignore_index=True)
    speed = learn_speed(table, GEMM, ANCHORS)
    assert speed.sensitivity == pytest.approx((0.3, 0.75), abs=0.02)
    floor = retest_ape_pct(table, GEMM, speed)
    assert floor is not None and floor < 2  # 23 % before


def test_an_iteration_is_corrected_by_what_it_consists_of() -> None:
    """Half in one long op that follows the product by 0.5, half in host events that follow views.

    The product takes 4 times as long as usual: 4^(0.5 * 0.5) of the time is the machine's.
    """
    measured = rows([1e6], [400.0], [20.0])
    [found] = iterations_at_reference_us(
        measured,
        ANCHORS,
        {"gemm": 5e8, "host": 5e8},
        {"gemm": 1, "host": 10**9},
        {"gemm": (0.5, 0.0), "host": (0.0, 1.0)},
    )
    assert found == pytest.approx(1e6 / 4**0.25, rel=0.01)
    [same] = iterations_at_reference_us(measured, {}, {"gemm": 1.0}, {}, {})
    assert same == 1e6


ROW = {"gpu": "x", "status": "ok", "time_us": 3.0, "op": "mm", "m": 3, "n": 4, "k": 5}


def test_whole_rows_pass_and_failed_points_need_no_time() -> None:
    failed = {**ROW, "status": "oom", "time_us": float("nan")}
    check_rows(pd.DataFrame([ROW, failed]), GEMM)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": -3}, "family gemm: m -3: allowed is greater_than_or_equal_to"),
        ({"status": "fine"}, "family gemm: status 'fine': allowed is isin"),
        ({"time_us": 0.0}, "family gemm: time_us 0.0: allowed is in_range"),
        ({"time_us": float("nan")}, "family gemm: time_us has no number .NaN. in 1 row"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_rows(pd.DataFrame([{**ROW, **change}]), GEMM)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="column 'k' not in dataframe"):
        check_rows(pd.DataFrame([ROW]).drop(columns="k"), GEMM)


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
    found = as_measured(rows, GEMM, ops)
    assert found["op"].tolist() == ["mm", "mm", "addmm", "bmm", "scaled_mm", "mm"]
    assert found["layout"].tolist() == ["nn", "nn", "nt", "nn", "nn", "nn"]
    assert as_measured(rows, GEMM, {}) is rows


def test_a_calibration_corrects_all_op_aliases() -> None:
    """Linear layers in bf16 stand as plain products: measured twice as slow, both are."""
    shipped = Bundle.load(SHIPPED)
    facts = {"family": "gemm", "gpu": "b200-sxm", "dtype": "bf16", "layout": "nt", "batch": 1}
    sizes = [{**facts, "op": "addmm", "m": m, "n": 4096, "k": 4096} for m in (1024, 2048, 4096)]
    rows = pd.DataFrame(sizes)
    before = shipped.price("gemm", rows)["predicted_us"]
    slow = calibrate_bundle(shipped, rows.assign(time_us=2 * before))
    for op in ("addmm", "mm"):
        after = slow.price("gemm", rows.assign(op=op))["predicted_us"]
        assert (after / before).between(1.7, 2.1).all()


def test_rows_of_a_slow_moment_correct_as_rows_of_a_usual_one() -> None:
    """Products that take 4 times as long while the anchors do, too, with a sensitivity of 1."""
    shipped = Bundle.load(SHIPPED_CPU)
    ((gpu, threads),) = (key for key in shipped.anchors if key[1] == 2)
    gemm = replace(shipped.models["gemm"], sensitivity=(1.0, 1.0))
    known = replace(shipped, models={"gemm": gemm}, anchors={(gpu, threads): (100.0, 50.0)})
    facts = {"family": "gemm", "gpu": gpu, "threads": threads, "dtype": "fp32", "op": "mm"}
    rows = pd.DataFrame([{**facts, "m": m, "n": 64, "k": 64, "batch": 1} for m in (64, 128)])
    usual = rows.assign(time_us=[90.0, 200.0], anchor_us=100.0, serial_us=50.0)
    slow = usual.assign(time_us=[360.0, 800.0], anchor_us=400.0, serial_us=200.0)
    by_usual, by_slow = (calibrate_bundle(known, r).price("gemm", rows) for r in (usual, slow))
    assert by_slow["predicted_us"].to_numpy() == pytest.approx(by_usual["predicted_us"].to_numpy())


PEAKS = {"fp32": 1e13}
GPUS = {"one": Gpu(name="one", peak_flops_per_s=PEAKS)}
GPUS |= {"cpu": Gpu(name="cpu", kind="cpu", peak_flops_per_s=PEAKS)}


def called(op: str, launches_us: list[float], gpu: str = "one", **columns: object) -> pd.DataFrame:
    """Rows of a sweep in which a pointwise op's call takes 2 us."""
    tiny_us = 2.0 / COLD_POINTWISE
    facts = {"gpu": gpu, "op": op, "cache": "warm", "tiny_launch_us": tiny_us, **columns}
    return pd.DataFrame({"launch_us": launches_us, **facts})


def test_a_call_costs_the_median_and_launches_what_was_profiled() -> None:
    """In calls of 2 us. Kernels are known of one row in four; cold rows repeat their warm ones.

    Two rows are too few.
    """
    bag = called("backward", [30.0, 28.0, 90.0, 32.0], kernel_count=[6.0, None, None, None])
    relu = called("relu", [4.0, 5.0, 6.0])
    cold = called("relu", [50.0] * 9).assign(cache="cold")
    few = called("tanh", [4.0, 4.0])
    nowhere = called("mul", [None] * 4)  # a part file of another source
    of_cpu = called("relu", [1.0] * 4, gpu="cpu")
    found = learn_host_calls(pd.concat([bag, relu, cold, few, nowhere, of_cpu]), ELEMENTWISE, GPUS)
    assert found == {
        "one": {
            "backward": HostCall(fixed=15.5, kernels=6.0, rows=4),
            "relu": HostCall(fixed=2.5, rows=3),
        }
    }
    assert learn_host_calls(relu.drop(columns="launch_us"), ELEMENTWISE, GPUS) == {}
    assert learn_host_calls(relu, fused.FAMILY, GPUS) == {}


def test_calls_of_an_op_are_told_apart_by_the_kernels_they_launch() -> None:
    """Gradients of few look-ups, of many, of maxima; of a plain look-up with and without a sort."""
    bags = {"rows": 1000.0, "dim": 16.0, "bags": 8.0, "mode": "sum"}
    few = called("backward", [20.0] * 3, **bags, lookups=2304.0, kernel_count=12.0)
    many = called("backward", [40.0] * 3, **bags, lookups=2305.0, kernel_count=31.0)
    maxima = called("backward", [6.0] * 3, **{**bags, "mode": "max"}, lookups=1e5, kernel_count=2.0)
    forward = called("forward", [8.0] * 3, **bags, lookups=8.0, kernel_count=1.0)
    calls = learn_host_calls(pd.concat([few, many, maxima, forward]), EMBEDDING_BAG, GPUS)["one"]
    assert calls == {
        "backward": HostCall(fixed=20.0, kernels=31.0, rows=3),
        "backward, few": HostCall(fixed=10.0, kernels=12.0, rows=3),
        "backward, max": HostCall(fixed=3.0, kernels=2.0, rows=3),
        "forward": HostCall(fixed=4.0, rows=3),
    }
    table = {"rows": 1000.0, "dim": 16.0}
    added = called("backward", [8.0] * 3, **table, lookups=3072.0)
    sorted_first = called("backward", [40.0] * 3, **table, lookups=3073.0)
    calls = learn_host_calls(pd.concat([added, sorted_first]), EMBEDDING, GPUS)["one"]
    assert {name: call.fixed for name, call in calls.items()} == {
        "backward": 20.0,
        "backward, unsorted": 4.0,
    }


def test_a_gpu_that_was_not_swept_takes_the_median_of_those_that_were() -> None:
    calls = {
        name: {"relu": HostCall(fixed=calls, kernels=1, rows=5)}
        for name, calls in (("one", 4.0), ("two", 9.0), ("three", 5.0))
    }
    assert host_call(calls, "two", "relu") == HostCall(fixed=9.0, kernels=1, rows=5)
    assert host_call(calls, "new", "relu") == HostCall(fixed=5.0, kernels=1, rows=15)
    assert host_call(calls, "one", "tanh") is None
