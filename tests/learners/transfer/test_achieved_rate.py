"""What large products reach on a GPU corrects forecasts of what was not measured on it."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest

from itercast.capture.base.switches import switching_off
from itercast.learners.bundle import SHIPPED, Bundle
from itercast.learners.features.table import Encoder
from itercast.learners.known_bundles import find_gpu
from itercast.learners.transfer.achieved_rate import correction
from itercast.learners.transfer.query_rows import QueryRows
from itercast.learners.transfer.source_gpus import SourceGpus
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops.matrix.conv import Conv, flops
from itercast.microbench.ops.matrix.gemm import FAMILY

SHIPS = Bundle.load(SHIPPED)
NEW = Gpu(
    name="new",
    peak_flops_per_s={"fp32": 2e13, "bf16": 2e14},
    achieved_flops_per_s={"fp32": 1e13},
    hbm_bytes_per_s=1e12,
)
KNOWN = replace(NEW, name="known", achieved_flops_per_s={"fp32": 1.6e13})
LARGE = 8192


def products(gpu: str, dtype: str, *sizes: int) -> pd.DataFrame:
    rows = [{"gpu": gpu, "op": "mm", "m": m, "n": LARGE, "k": LARGE, "batch": 1} for m in sizes]
    return pd.DataFrame(rows).assign(layout="nn", dtype=dtype, family="gemm")


def factors(rows: pd.DataFrame, known: Gpu = KNOWN) -> np.ndarray:
    """Where the GPU ``known`` was measured in fp32, and none other."""
    query = QueryRows(
        gpu=rows["gpu"].to_numpy(),
        dtype=rows["dtype"].to_numpy(),
        op=rows["op"].to_numpy(),
        stack=np.full(len(rows), ""),
        wanted=np.full(len(rows), ""),
        gpus={"new": NEW, "known": known},
        rows=rows,
        family=FAMILY,
        launch={},
    )
    measured = {"known": {"fp32": {"mm": ("",)}}}
    encoder = Encoder(["gpu"], {"gpu": ["known"]})
    return correction(query, SourceGpus(encoder=encoder, measured=measured, gpus={"known": known}))


def test_computing_is_slower_by_what_both_gpus_achieve() -> None:
    """Both have a peak of 2e13 FLOP/s; one achieves 1e13 of it, the other, with rows, 1.6e13.

    So computing takes 1.6 times as long as on the one with rows. A product of one row computes
    6.7 us and moves 268 MB, 268 us: that stays. One of 32 rows computes 215 us, and 344 so, which
    is more than the 271 us that it moves data.
    """
    large, few, one = factors(products("new", "fp32", LARGE, 32, 1))
    assert large == pytest.approx(1.6, rel=1e-3)
    compute_us = 2 * 32 * LARGE**2 / 2e13 * 1e6
    memory_us = 4 * (LARGE**2 + 2 * 32 * LARGE) / 1e12 * 1e6
    assert compute_us < memory_us
    assert few == pytest.approx((1.6 * compute_us + 2) / (memory_us + 2))
    assert one == 1


def test_what_was_measured_or_is_not_stated_stays() -> None:
    assert factors(products("known", "fp32", LARGE)) == 1
    assert factors(products("new", "bf16", LARGE)) == 1
    unstated = replace(KNOWN, achieved_flops_per_s={})
    assert factors(products("new", "fp32", LARGE), unstated) == 1
    with switching_off("achieved_rate"):
        assert factors(products("new", "fp32", LARGE)) == 1


NEVER_MEASURED = ("l4", "h100-pcie-80gb", "mi210", "h200-sxm-141gb", "rtx-3090")
STATED = [(gpu, dtype) for gpu in NEVER_MEASURED for dtype in load_gpu(gpu).achieved_flops_per_s]


@pytest.mark.parametrize(("gpu", "dtype"), STATED)
def test_the_bundle_that_ships_forecasts_the_stated_rate(gpu: str, dtype: str) -> None:
    facts = load_gpu(gpu)
    us = forecast_us(facts, dtype)
    assert 2e6 * LARGE**3 / us == pytest.approx(facts.achieved_flops_per_s[dtype], rel=0.2)
    half, quarter = (
        replace(facts, achieved_flops_per_s={dtype: facts.achieved_flops_per_s[dtype] / times})
        for times in (2, 4)
    )
    assert forecast_us(quarter, dtype) == pytest.approx(2 * forecast_us(half, dtype), rel=0.01)


def forecast_us(gpu: Gpu, dtype: str, op: str = "mm") -> float:
    """Of a large product, by the bundle that ships."""
    row = products(gpu.name, dtype, LARGE).assign(op=op)
    return float(SHIPS.price("gemm", row, {gpu.name: gpu})["predicted_us"].iloc[0])


def slowed(name: str, dtype: str, op: str = "mm") -> float:
    """How much longer it takes for what is published of the GPU."""
    gpu = load_gpu(name)
    without = replace(gpu, achieved_flops_per_s={})
    return forecast_us(gpu, dtype, op) / forecast_us(without, dtype, op)


@pytest.mark.parametrize(
    ("dtype", "op", "same"),
    [("tf32", "mm", False), ("fp16", "mm", True), ("bf16", "mm", True), ("fp8", "scaled_mm", True)],
)
def test_what_was_measured_in_half_is_not_corrected(dtype: str, op: str, same: bool) -> None:
    """The A40 of the bundle was measured in fp16 alone: its own rows tell of bf16 and fp8 too."""
    assert (slowed("a40", dtype, op) == 1) is same


@pytest.mark.parametrize("gpu", ["v100-pcie-32gb", "v100-sxm-16gb", "p100-pcie-16gb"])
def test_a_dilated_convolution_is_no_faster_than_the_peak(gpu: str) -> None:
    """Rows of these GPUs in fp32 are of 3 x 3 at stride 1 alone, which run above the peak."""
    sizes = {"batch": 8, "in_channels": 256, "out_channels": 256, "h": 96, "w": 96}
    plain = Conv(op="forward", kernel_h=3, kernel_w=3, padding_h=1, padding_w=1, **sizes)
    dilated = replace(plain, dilation=2, padding_h=2, padding_w=2)
    rows = pd.DataFrame([asdict(plain), asdict(dilated)]).assign(gpu=gpu, family="conv")
    peak_us = flops(dilated) / load_gpu(gpu).peak("fp32") * 1e6
    plain_us, dilated_us = SHIPS.price("conv", rows)["predicted_us"]
    assert plain_us < peak_us
    assert dilated_us >= peak_us * (1 - 1e-9)
    with switching_off("peak_rate"):
        assert SHIPS.price("conv", rows)["predicted_us"].iloc[1] < dilated_us


def test_the_bundle_that_ships_knows_gpus_as_the_files_do() -> None:
    """A fact corrected in a file alone would be priced by the old one; peaks may be added."""
    for name in SHIPS.gpus:
        assert find_gpu(name, SHIPS) == load_gpu(name)
