"""The forecast of one iteration: priced ops on the lanes of a host and a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from compose.memory import peak_bytes
from compose.plan import ParallelPlan
from compose.priced import UNMODELLED, PricedOp, Pricer, price_calls
from microbench.hardware.spec import Gpu
from microbench.opcall import StepCapture

# Where no host model was trained: us per event on a server CPU, an assumption, not a measurement.
ASSUMED_HOST_US = {"module_call": 3.0, "view_op": 1.0, "autograd_node": 3.0}
ASSUMED_LAUNCH_US = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Times in us per iteration of the slowest rank: iteration = compute + exposed_comm + idle.

    The interval takes errors within one family as fully correlated and those of different families
    as independent.
    """

    gpu: str
    plan: str
    bundle: str
    iteration_us: float
    iteration_us_p10: float
    iteration_us_p90: float
    host_us: float
    compute_us: float
    comm_us: float
    exposed_comm_us: float
    idle_us: float
    memory_bytes: int
    samples_per_s: float
    tokens_per_s: float
    mfu_frac: float
    unmodelled_frac: float
    by_family_us: Mapping[str, float]


def host_event_us(pricer: Pricer, gpu: Gpu, threads: int) -> dict[str, float]:
    """Time per host event: learned where the bundle has the family, else assumed."""
    if "host" not in pricer.models:
        return dict(ASSUMED_HOST_US)
    ops = list(ASSUMED_HOST_US)
    rows = pd.DataFrame({"op": ops, "trial": 0, "dtype": "fp32"})
    rows = rows.assign(gpu=gpu.name, threads=threads, cache="warm")
    priced = pricer.price("host", rows, {gpu.name: gpu})["predicted_us"]
    return dict(zip(ops, (float(v) for v in priced), strict=True))


def eager_timeline(ops: Sequence[PricedOp], launch_us: float) -> tuple[float, float]:
    """End of the device lane and its idle time, when one host thread launches op after op."""
    host_us = device_us = idle_us = 0.0
    for op in ops:
        host_us += launch_us
        idle_us += max(0.0, host_us - device_us)
        device_us = max(device_us, host_us) + op.duration_us
    return device_us, idle_us


def interval(ops: Sequence[PricedOp], total_us: float) -> tuple[float, float]:
    """10 and 90 % quantiles of the total around its estimate."""
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for op in ops:
        low[op.family] = low.get(op.family, 0.0) + op.duration_us - op.low_us
        high[op.family] = high.get(op.family, 0.0) + op.high_us - op.duration_us
    down = sum(v * v for v in low.values()) ** 0.5
    up = sum(v * v for v in high.values()) ** 0.5
    return max(0.0, total_us - down), total_us + up


def forecast(
    capture: StepCapture,
    pricer: Pricer,
    gpu: Gpu,
    plan: ParallelPlan,
    *,
    bundle_name: str,
    threads: int,
    optimizer: str,
) -> Forecast:
    """One iteration of a captured step. On a CPU the host is the compute lane: times add up."""
    ops = price_calls(capture, pricer, gpu, threads)
    by_family: dict[str, float] = {}
    for op in ops:
        by_family[op.family] = by_family.get(op.family, 0.0) + op.duration_us
    kernels_us = sum(by_family.values())
    if gpu.kind == "cpu":
        event_us = host_event_us(pricer, gpu, threads)
        host_us = sum(event_us.get(k, 0.0) * n for k, n in capture.host.items())
        by_family["host"] = host_us
        iteration_us, idle_us = kernels_us + host_us, 0.0
        compute_us = iteration_us
    else:
        host_us = ASSUMED_LAUNCH_US * len(ops)
        iteration_us, idle_us = eager_timeline(ops, ASSUMED_LAUNCH_US)
        compute_us = kernels_us
    low_us, high_us = interval(ops, iteration_us)
    flops = sum(op.flops for op in ops if op.family in ("gemm", "attention", "conv"))
    seconds = max(iteration_us, 1e-3) * 1e-6
    return Forecast(
        gpu=gpu.name,
        plan=f"dp={plan.dp}",
        bundle=bundle_name,
        iteration_us=iteration_us,
        iteration_us_p10=low_us,
        iteration_us_p90=high_us,
        host_us=host_us,
        compute_us=compute_us,
        comm_us=0.0,
        exposed_comm_us=0.0,
        idle_us=idle_us,
        memory_bytes=peak_bytes(capture, optimizer),
        samples_per_s=capture.samples / seconds,
        tokens_per_s=capture.tokens / seconds,
        mfu_frac=flops / seconds / gpu.peak("fp32"),
        unmodelled_frac=by_family.get(UNMODELLED, 0.0) / max(kernels_us, 1e-9),
        by_family_us=by_family,
    )
