"""Little's law: fast memory is not reached in full by threads that read a few bytes each."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from itercast.learners.bundle import SHIPPED, Bundle
from itercast.learners.features.table import columns
from itercast.learners.transfer.bytes_in_flight import (
    LATENCY_NS,
    THREADS_PER_SM,
    bytes_per_thread,
    slowdown,
)
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops import families

SHIPS = Bundle.load(SHIPPED)
LARGE = 2**28


def gpu(needed_over_limit: float, sms: int = 10) -> Gpu:
    """A GPU whose memory needs this many times what 32 bytes per thread can have on their way."""
    rate = needed_over_limit * sms * THREADS_PER_SM * 32 / (LATENCY_NS * 1e-9)
    return Gpu(name="new", peak_flops_per_s={"fp32": 1e13}, hbm_bytes_per_s=rate, sm_count=sms)


def share_of_peak(name: str, dtype: str, stack: str = "", size: int = LARGE) -> float:
    """Share of the memory's peak that a forecast scalar product of ``size`` elements reaches."""
    family, hardware = families()["elementwise"], load_gpu(name)
    row = {"family": "elementwise", "gpu": name, "op": "mul", "form": "scalar", "dtype": dtype}
    rows = pd.DataFrame([row | {"tensors": 1, "numel": size, "inner": size, "stack_wanted": stack}])
    us = SHIPS.price("elementwise", rows, {name: hardware})["predicted_us"].iloc[0]
    moved = float(np.ravel(family.bytes_moved(columns(rows, family)))[0])
    return float(moved / us * 1e6 / hardware.hbm_bytes_per_s)


def test_peak_and_limit_add_in_squares() -> None:
    """rate = 1 / sqrt(1 / peak^2 + 1 / limit^2): 4/5 of a peak that is 3/4 of the limit."""
    assert slowdown(gpu(0.75), 32) == pytest.approx(1.25)
    assert slowdown(gpu(0.75), 16) == pytest.approx(np.hypot(1.0, 1.5))


def test_more_sms_make_up_for_more_bandwidth() -> None:
    assert slowdown(gpu(0.5, sms=20), 32) == pytest.approx(slowdown(gpu(0.5, sms=40), 32))
    assert slowdown(gpu(0.5), 32) < slowdown(gpu(1.0), 32)


def test_a_cpu_is_not_corrected() -> None:
    cpu = Gpu(name="cpu", kind="cpu", peak_flops_per_s={"fp32": 1e12}, hbm_bytes_per_s=1e12)
    assert slowdown(cpu, 32) == 1.0


def test_threads_of_older_torch_read_four_elements() -> None:
    """fp16: 4 * 2 bytes in and out before torch 2.7, then 16 and 16; fp32: always 16 and 16."""
    stacks = ("torch-2.3.0+cu121", "torch-2.11", "", "vllm-0.24.0")
    assert [bytes_per_thread("fp16", s) for s in stacks] == [16, 32, 32, 32]
    assert [bytes_per_thread("fp32", s) for s in stacks] == [32, 32, 32, 32]


def test_a_forecast_reaches_less_of_a_faster_memory() -> None:
    """The H100 and H200 have equal SMs: shares differ as the law says, sqrt(1 + ratio^2)."""
    h100, h200 = load_gpu("h100-sxm-80gb"), load_gpu("h200-sxm-141gb")
    law = slowdown(h100, 32) / slowdown(h200, 32)
    found = share_of_peak("h200-sxm-141gb", "fp32") / share_of_peak("h100-sxm-80gb", "fp32")
    assert law < 0.98
    assert found == pytest.approx(law, abs=0.005)


def test_a_measured_gpu_is_not_corrected_and_a_tiny_op_hardly() -> None:
    """The source GPU keeps its forecast whatever the torch; of a tiny op the launch decides."""
    new, old = (share_of_peak("a100-pcie-80gb", "fp32", s) for s in ("torch-2.11", "torch-2.3"))
    assert new == pytest.approx(old)
    tiny = [share_of_peak("b200-sxm", "fp16", s, 2**10) for s in ("torch-2.11", "torch-2.3")]
    assert tiny[0] == pytest.approx(tiny[1], rel=0.01)
    large = [share_of_peak("b200-sxm", "fp16", s) for s in ("torch-2.11", "torch-2.3")]
    assert large[1] < 0.9 * large[0]
