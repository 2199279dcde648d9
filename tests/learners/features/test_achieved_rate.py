"""Products are learned as multiples of a roofline at the rate that large ones achieve on a GPU."""

from dataclasses import asdict, replace
from itertools import islice

import numpy as np
import pandas as pd
import pytest
from toy_products import timed

from itercast.capture.base.switches import switching_off
from itercast.learners.bundle import SHIPPED, Bundle
from itercast.learners.family_model import learn_quickly, prepare
from itercast.learners.features.rooflines import USUAL_SLOWDOWN, achieved_rate
from itercast.learners.features.table import feature_table
from itercast.learners.known_bundles import find_gpu
from itercast.learners.models.trees import default_options
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops.matrix.conv import Conv, flops
from itercast.microbench.ops.matrix.gemm import FAMILY, Gemm

SHIPS = Bundle.load(SHIPPED)
HALF = Gpu(
    name="half",
    sm_count=8,
    peak_flops_per_s={"fp32": 2e13, "tf32": 8e13, "fp16": 1.6e14, "fp8": 4e14},
    achieved_flops_per_s={"fp32": 1e13, "fp16": 1.2e14},
    hbm_bytes_per_s=1e12,
)
WHOLE = replace(HALF, name="whole", architecture="ada", achieved_flops_per_s={"fp32": 2e13})
LARGE = 8192


def products(gpu: str, dtype: str, *sizes: int) -> pd.DataFrame:
    rows = [asdict(Gemm(m=m, n=LARGE, k=LARGE, dtype=dtype)) for m in sizes]
    return pd.DataFrame(rows).assign(gpu=gpu, family="gemm")


def test_a_rate_that_is_not_stated_is_that_of_alike_cores_or_the_usual_share() -> None:
    """TF32 runs on fp16's cores, which achieve three quarters of their peak: 6e13 of 8e13."""
    assert achieved_rate(HALF, "fp32") == 1e13
    assert achieved_rate(HALF, "tf32") == pytest.approx(6e13)
    assert achieved_rate(HALF, "fp8") == pytest.approx(4e14 / USUAL_SLOWDOWN)  # as bf16: unstated
    assert achieved_rate(replace(HALF, kind="cpu"), "fp8") == 4e14


def test_a_roofline_computes_at_the_achieved_rate_and_features_tell_the_peak() -> None:
    """2 * 8192^3 FLOP at 1e13 and 2e13 FLOP/s; moving one row's 268 MB takes as long on both."""
    gpus = {"half": HALF, "whole": WHOLE}
    rows = pd.concat([products(name, "fp32", LARGE, 1) for name in gpus], ignore_index=True)
    features, roofline_us = feature_table(rows, FAMILY, gpus)
    compute_us = 2 * LARGE**3 / 1e13 * 1e6
    memory_us = 4 * (LARGE**2 + 2 * LARGE) / 1e12 * 1e6
    expected = [compute_us + 2, memory_us + 2, compute_us / 2 + 2, memory_us + 2]
    assert roofline_us == pytest.approx(np.array(expected))
    for name in ("log_roofline", "log_bound"):
        assert features[name][:2].tolist() == features[name][2:].tolist()


def test_a_gpu_without_rows_is_as_far_from_its_rate_as_one_with_rows_from_its_own() -> None:
    """Rows of a GPU that takes twice the time at its peak, and states so, say nothing of others."""
    known = timed(
        islice((p for p in FAMILY.sweep() if p.dtype == "fp32"), 200), lambda p: 2.0, HALF
    )
    known = known[known["m"] * known["n"] * known["k"] > 1e7]  # those that compute
    prepared = prepare(known, FAMILY, {"half": HALF})
    model = learn_quickly(prepared, np.arange(len(known)), default_options(prepared.table))
    asked = pd.concat([products(name, "fp32", LARGE) for name in ("half", "whole")])
    gpus = {"half": HALF, "whole": WHOLE}
    half_us, whole_us = model.predict(asked.reset_index(drop=True), FAMILY, gpus).time_us
    assert half_us / whole_us == pytest.approx(2.0, rel=1e-3)


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


def forecast_us(gpu: Gpu, dtype: str) -> float:
    """Of a large product, by the bundle that ships."""
    row = products(gpu.name, dtype, LARGE)
    return float(SHIPS.price("gemm", row, {gpu.name: gpu})["predicted_us"].iloc[0])


@pytest.mark.parametrize("gpu", ["v100-pcie-32gb", "v100-sxm-16gb", "p100-pcie-16gb"])
def test_a_dilated_convolution_is_slower_than_large_products(gpu: str) -> None:
    """Rows of these GPUs in fp32 are of 3 x 3 at stride 1 alone, which run above the peak."""
    sizes = {"batch": 8, "in_channels": 256, "out_channels": 256, "h": 96, "w": 96}
    plain = Conv(op="forward", kernel_h=3, kernel_w=3, padding_h=1, padding_w=1, **sizes)
    dilated = replace(plain, dilation=2, padding_h=2, padding_w=2)
    rows = pd.DataFrame([asdict(plain), asdict(dilated)]).assign(gpu=gpu, family="conv")
    facts = load_gpu(gpu)
    peak_us = flops(dilated) / facts.peak("fp32") * 1e6
    product_us = flops(dilated) / facts.achieved_flops_per_s["fp32"] * 1e6
    share = {"volta": 0.90, "pascal": 0.88}[facts.architecture]
    plain_us, dilated_us = SHIPS.price("conv", rows)["predicted_us"]
    assert plain_us < peak_us < product_us
    assert dilated_us >= product_us / share * (1 - 1e-9)
    with switching_off("peak_rate"):
        assert SHIPS.price("conv", rows)["predicted_us"].iloc[1] < dilated_us


def test_geforce_cards_limit_tensor_cores_alone() -> None:
    """VGG-16's forward of 12 images in fp32 takes an RTX 2080 Ti 24.2 ms, 1.14 of its peak.

    2 * 12 * 15.5e9 multiply-adds / 24.2 ms = 15.4 TFLOP/s
    (https://github.com/ryujaehun/pytorch-gpu-benchmark); the halving of sums in fp32 is of fp16.
    """
    side = {"h": 56, "w": 56, "kernel_h": 3, "kernel_w": 3, "padding_h": 1, "padding_w": 1}
    one = Conv(op="forward", batch=12, in_channels=256, out_channels=256, **side)
    rows = pd.DataFrame([asdict(replace(one, dtype=d)) for d in ("fp32", "fp16")])
    facts = load_gpu("rtx-2080-ti")
    rows = rows.assign(gpu=facts.name, family="conv")
    in_fp32_us, in_fp16_us = SHIPS.price("conv", rows, {facts.name: facts})["predicted_us"]
    assert in_fp32_us < flops(one) / facts.peak("fp32") * 1e6
    assert in_fp16_us >= flops(one) / facts.peak("fp16") * 1e6 * (1 - 1e-9)


def test_the_bundle_that_ships_knows_gpus_as_the_files_do() -> None:
    """A fact corrected in a file alone would be priced by the old one; peaks may be added."""
    for name in SHIPS.gpus:
        assert find_gpu(name, SHIPS) == load_gpu(name)
