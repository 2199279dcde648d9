"""What a call costs the host, op by op, from hand-made rows."""

from __future__ import annotations

import pandas as pd
import pytest

from itercast.learners.features.host_calls import HostCall, host_call, learn_host_calls
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.memory import fused
from itercast.microbench.ops.memory.elementwise import FAMILY

PEAKS = {"fp32": 1e13}
GPUS = {"one": Gpu(name="one", peak_flops_per_s=PEAKS)}
GPUS |= {"cpu": Gpu(name="cpu", kind="cpu", peak_flops_per_s=PEAKS)}


def rows(op: str, launches_us: list[float], gpu: str = "one", **columns: object) -> pd.DataFrame:
    return pd.DataFrame(
        {"gpu": gpu, "op": op, "launch_us": launches_us, "cache": "warm", **columns}
    )


def test_a_call_costs_the_median_and_launches_what_was_profiled() -> None:
    """Kernels are known of one row in four; cold rows repeat their warm ones; two are too few."""
    bag = rows("backward", [30.0, 28.0, 90.0, 32.0], kernel_count=[6.0, None, None, None])
    relu = rows("relu", [4.0, 5.0, 6.0])
    cold = rows("relu", [50.0] * 9).assign(cache="cold")
    few = rows("tanh", [4.0, 4.0])
    nowhere = rows("mul", [None] * 4)  # a part file of another source
    of_cpu = rows("relu", [1.0] * 4, gpu="cpu")
    found = learn_host_calls(pd.concat([bag, relu, cold, few, nowhere, of_cpu]), FAMILY, GPUS)
    assert found == {
        "one": {
            "backward": HostCall(fixed_us=31.0, kernels=6.0, rows=4),
            "relu": HostCall(fixed_us=5.0, rows=3),
        }
    }
    assert learn_host_calls(relu.drop(columns="launch_us"), FAMILY, GPUS) == {}
    assert learn_host_calls(relu, fused.FAMILY, GPUS) == {}


def test_lists_of_tensors_cost_by_tensor() -> None:
    """10 us, and 0.5 for each tensor; an op of two or three operands is on no list."""
    tensors = [1, 10, 50, 200]
    listed = rows("_foreach_mul_", [10 + 0.5 * n for n in tensors], tensors=tensors)
    found = learn_host_calls(listed, FAMILY, GPUS)["one"]["_foreach_mul_"]
    assert (found.fixed_us, found.per_tensor_us) == (pytest.approx(10), pytest.approx(0.5))
    assert found.us(100) == pytest.approx(60)
    operands = rows("where", [5.0, 6.0, 7.0], tensors=[2, 3, 3])
    assert learn_host_calls(operands, FAMILY, GPUS)["one"]["where"].us(3) == 6.0


def test_a_line_begins_and_rises_above_zero() -> None:
    shrinking = rows("_foreach_neg", [9.0, 8.0, 7.0, 6.0], tensors=[1, 10, 50, 200])
    assert learn_host_calls(shrinking, FAMILY, GPUS)["one"]["_foreach_neg"].us(200) == 7.5
    steep = rows("_foreach_neg", [1.0, 10.0, 60.0, 250.0], tensors=[1, 10, 50, 200])
    found = learn_host_calls(steep, FAMILY, GPUS)["one"]["_foreach_neg"]
    assert min(found.fixed_us, found.per_tensor_us) >= 0


def test_a_gpu_that_was_not_swept_takes_the_median_of_those_that_were() -> None:
    calls = {
        name: {"relu": HostCall(fixed_us=us, kernels=1, rows=5)}
        for name, us in (("one", 4.0), ("two", 9.0), ("three", 5.0))
    }
    assert host_call(calls, "two", "relu") == HostCall(fixed_us=9.0, kernels=1, rows=5)
    assert host_call(calls, "new", "relu") == HostCall(fixed_us=5.0, kernels=1, rows=15)
    assert host_call(calls, "one", "tanh") is None
