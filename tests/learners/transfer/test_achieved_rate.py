"""What large products reach on a GPU corrects forecasts of what was not measured on it."""

from __future__ import annotations

from dataclasses import replace

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
from itercast.microbench.ops.matrix.gemm import FAMILY, LARGE

SHIPS = Bundle.load(SHIPPED)
NEW = Gpu(
    name="new",
    peak_flops_per_s={"fp32": 2e13, "bf16": 2e14},
    achieved_flops_per_s={"fp32": 1e13},
    hbm_bytes_per_s=1e12,
)
KNOWN_US = 2 * LARGE**3 / 1e13 * 1e6


def products(gpu: str, dtype: str, *sizes: int) -> pd.DataFrame:
    rows = [{"gpu": gpu, "op": "mm", "m": m, "n": LARGE, "k": LARGE, "batch": 1} for m in sizes]
    return pd.DataFrame(rows).assign(layout="nn", dtype=dtype, family="gemm")


def factors(rows: pd.DataFrame, source_us: float = KNOWN_US) -> np.ndarray:
    """With a learner that says 27,488 us of everything on a GPU never measured."""
    known = replace(NEW, name="known")
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
    source_gpus = SourceGpus(encoder=encoder, measured=measured, gpus={"known": known})
    return correction(
        query, source_gpus, lambda large: np.where(large["gpu"] == "known", source_us, 27_488.0)
    )


def test_the_factor_is_a_power_of_known_over_forecast_time() -> None:
    """2 * 8192**3 FLOP at 1e13 a second take 109,951 us: four times what the learner says.

    A product of one row computes 6.7 us and moves 268 MB, 268 us, after a launch of 2 us; computing
    has a share of 0.024 in that, of 0.985 in the large one.
    """
    large, thin = factors(products("new", "fp32", LARGE, 1))
    compute_us, memory_us = 2 * LARGE**3 / 2e13 * 1e6, 4 * 3 * LARGE**2 / 1e12 * 1e6
    share = compute_us / (compute_us + memory_us + 2)
    assert share == pytest.approx(0.985, abs=1e-3)
    assert large == pytest.approx(4, rel=1e-3)
    assert thin == pytest.approx(4 ** (6.71 / (6.71 + 268.5 + 2) / share), rel=1e-3)


def test_what_was_measured_or_is_not_stated_stays() -> None:
    assert factors(products("known", "fp32", LARGE)) == 1
    assert factors(products("new", "bf16", LARGE)) == 1
    with switching_off("achieved_rate"):
        assert factors(products("new", "fp32", LARGE)) == 1


def test_software_slower_than_what_was_published_is_so_everywhere() -> None:
    """The source GPU takes 1.25 times what was published of it: so will the new one."""
    published = factors(products("new", "fp32", LARGE))
    slower = factors(products("new", "fp32", LARGE), source_us=1.25 * KNOWN_US)
    assert slower == pytest.approx(1.25 * published)


NEVER_MEASURED = ("l4", "h100-pcie-80gb", "mi210", "h200-sxm-141gb", "rtx-3090")
STATED = [(gpu, dtype) for gpu in NEVER_MEASURED for dtype in load_gpu(gpu).achieved_flops_per_s]


@pytest.mark.parametrize(("gpu", "dtype"), STATED)
def test_the_bundle_that_ships_forecasts_the_stated_rate(gpu: str, dtype: str) -> None:
    facts = load_gpu(gpu)
    us = forecast_us(facts, dtype)
    assert 2e6 * LARGE**3 / us == pytest.approx(facts.achieved_flops_per_s[dtype], rel=0.2)
    slower = replace(facts, achieved_flops_per_s={dtype: facts.achieved_flops_per_s[dtype] / 2})
    assert forecast_us(slower, dtype) == pytest.approx(2 * us, rel=0.01)


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


def test_the_bundle_that_ships_knows_gpus_as_the_files_do() -> None:
    """A fact corrected in a file alone would be priced by the old one; peaks may be added."""
    for name in SHIPS.gpus:
        assert find_gpu(name, SHIPS) == load_gpu(name)
