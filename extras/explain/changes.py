"""Forecasts what each of many changes would gain: of software, plan, batch, GPU, hardware rates.

Each change of software, plan, batch or GPU is a forecast of its own. For a hardware rate, such as
memory bandwidth, the GPU is forecast twice under a name without measured rows: as it is, and with
the rate doubled. Both forecasts then come from models of other GPUs, so that their ratio shows the
effect of the rate alone; the original forecast is multiplied by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import SizedModel
from itercast.compose.forecast import CONVOLUTION, Forecast
from itercast.compose.graph.launch_modes import FUSED
from itercast.compose.predict import prepare
from itercast.compose.target import Target, forecast_step
from itercast.microbench.hardware.node import Node
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.store import Facts, Row

OTHER_GPUS = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm")
TWIN = "twin"  # the same hardware under a name that no row has
TWICE = "twice the "
HARDWARE, SOFTWARE, PLAN, SIZE, GPU = "hardware", "software", "plan", "batch", "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change and what it would bring.

    ``gain_frac`` is samples/s with the change over those without, minus 1. ``kind`` is hardware,
    software, plan, batch or gpu. ``fits``: the peak memory is within the device's.
    """

    name: str
    kind: str
    iteration_us: float
    samples_per_s: float
    gain_frac: float
    fits: bool


def changes(
    model: Any, asked: Facts, on_progress: Callable[[str], None] = lambda name: None
) -> list[Change]:
    """Forecasts what each change gains; returns them sorted, the largest gain first.

    ``model`` and ``asked`` (the other arguments) are those of ``predict``. Changes that cannot be
    forecast (no such kernels, no such unit, too few samples) are left out. ``on_progress`` is told
    the name of each change before it is forecast.
    """
    step, target = prepare(model, **asked)
    base = forecast_step(step, target)
    on_progress("twice each hardware rate")
    found = list(_hardware_changes(step, target, base))
    for name, kind, other in _other_questions(model, asked, step, target):
        on_progress(name)
        try:
            found.append(_change(name, kind, forecast_step(*prepare(model, **other)), base))
        except ValueError:
            continue
    return sorted(found, key=lambda change: -change.gain_frac)


def _change(name: str, kind: str, found: Forecast, base: Forecast) -> Change:
    return Change(
        name=name,
        kind=kind,
        iteration_us=found.iteration_us,
        samples_per_s=found.samples_per_s,
        gain_frac=found.samples_per_s / base.samples_per_s - 1,
        fits=found.fits,
    )


def _other_questions(
    model: Any, asked: Facts, step: StepCapture, target: Target
) -> Iterator[tuple[str, str, Row]]:
    """Yields name, kind and ``predict`` arguments of changes of software, plan, batch or GPU."""
    plan, gpu = target.plan, target.gpu
    is_named = isinstance(model, str | Path | SizedModel)  # else a module's dtype and batch stay
    if gpu.kind != "cpu":
        for other in OTHER_GPUS:
            if other != gpu.name and not plan.node:
                yield other, GPU, {**asked, "gpu": other}
        if step.engine in ("eager", FUSED):
            yield "torch.compile", SOFTWARE, {**asked, "engine": "compile"}
            yield "a CUDA graph", SOFTWARE, {**asked, "engine": "graph"}
    for text, changed in _other_plans(plan):
        yield text, PLAN, {**asked, "plan": str(changed)}
    if not is_named:
        return
    if asked.get("attn") == "eager":
        yield "fused attention", SOFTWARE, {**asked, "attn": "sdpa"}
    name, *beside = step.optimizer.split("+")
    if gpu.kind != "cpu" and name == "adamw":
        yield "fused AdamW", SOFTWARE, {**asked, "optimizer": "+".join(["adamw_fused", *beside])}
    if not asked.get("channels_last") and any(c.op == CONVOLUTION for c in step.calls):
        yield "channels_last (NHWC)", SOFTWARE, {**asked, "channels_last": True}
    faster = _faster_dtypes(asked.get("dtype") or "fp32", gpu, plan)
    for dtype in faster:
        yield f"dtype {dtype}", SOFTWARE, {**asked, "dtype": dtype}
    if "bf16" in faster:
        mixed = {"plan": str(replace(plan, amp=True)), "dtype": "bf16"}
        yield "bf16 autocast (amp)", SOFTWARE, {**asked, **mixed}
    batch = step.samples * plan.microbatches
    yield f"batch {2 * batch} for {batch}", SIZE, {**asked, "batch": 2 * batch}


def _faster_dtypes(dtype: str, gpu: Gpu, plan: ParallelPlan) -> list[str]:
    """Dtypes with a higher peak than this one, of those that training commonly uses."""
    if plan.amp or gpu.kind == "cpu":
        return []
    known = [d for d in ("tf32", "bf16", "fp8", "nvfp4") if d in gpu.peak_flops_per_s]
    return [d for d in known if gpu.peak(d) > gpu.peak(dtype)]


def _other_plans(plan: ParallelPlan) -> Iterator[tuple[str, ParallelPlan]]:
    """Plans with the same degrees and one option changed."""
    if plan.recompute:
        yield "no recomputation", replace(plan, recompute="", recomputed=1.0)
    else:
        yield "layers recomputed", replace(plan, recompute="full")
    if plan.tp > 1 and not plan.sp:
        yield "sequence parallelism (sp)", replace(plan, sp=True)
    if plan.tp > 1 and not plan.tp_overlap and plan.sp:
        yield "messages of tp beside products (tp_overlap)", replace(plan, tp_overlap=True)
    if plan.pp > 1 and plan.schedule == "1f1b":
        yield "zero-bubble schedule", replace(plan, schedule="zb")
    if plan.pp > 1:
        yield "twice as many micro-batches", replace(plan, micro=2 * plan.microbatches)
    if plan.zero == 3 and not plan.cdp:
        yield "ZeRO 2 for 3", replace(plan, zero=2)


def _hardware_changes(step: StepCapture, target: Target, base: Forecast) -> Iterator[Change]:
    """Forecasts each hardware rate doubled, relative to ``_twin``: the same GPU without rows."""
    twin = _twin(target)
    without = forecast_step(step, twin)
    for name, other in _doubled(twin):
        ratio = forecast_step(step, other).iteration_us / without.iteration_us
        rate = base.samples_per_s / ratio
        faster = replace(base, iteration_us=base.iteration_us * ratio, samples_per_s=rate)
        yield _change(TWICE + name, HARDWARE, faster, base)


def _twin(target: Target) -> Target:
    """The same hardware under names that no measured row has."""
    gpu, host = replace(target.gpu, name=TWIN), replace(target.host, name=TWIN)
    return replace(target, gpu=gpu, host=host if gpu.kind != "cpu" else target.host)


def _doubled(twin: Target) -> Iterator[tuple[str, Target]]:
    """Yields names and targets: ``twin`` with one rate of the hardware doubled."""
    gpu, host = twin.gpu, twin.host
    yield "memory bandwidth", replace(twin, gpu=_with_doubled(gpu, "hbm_bytes_per_s"))
    rates = ("peak_flops_per_s", "full_rate_flops_per_s", "achieved_flops_per_s")
    if gpu.kind == "cpu":
        yield "compute", replace(twin, gpu=_with_doubled(gpu, *rates))
        return
    # As many SMs again, with their power: twice the clock would meet the same power limit.
    more = replace(_with_doubled(gpu, *rates, "power_w"), sm_count=2 * gpu.sm_count)
    yield "compute", replace(twin, gpu=more)
    faster = replace(host, slowdown=host.slowdown / 2, launch_us=host.launch_us / 2)
    yield "speed of the host", replace(twin, host=faster)
    if twin.plan.world_size > 1:
        links = _with_doubled(gpu, "link_bytes_per_s", "pcie_bytes_per_s")
        node = twin.node and _faster_node(twin.node, "link_bytes_per_s")
        yield "rate of links", replace(twin, gpu=links, node=node)
    if twin.node is not None and twin.node.network_bytes_per_s:
        faster_network = _faster_node(twin.node, "network_bytes_per_s")
        yield "rate of the network", replace(twin, node=faster_network)


def _faster_node(node: Node, rate: str) -> Node:
    return replace(node, **{rate: 2 * getattr(node, rate)})


def _with_doubled(gpu: Gpu, *names: str) -> Gpu:
    """Returns the GPU with these rates doubled; a rate by dtype is doubled for each dtype."""
    values = {name: getattr(gpu, name) for name in names}
    doubled: Row = {
        name: {k: 2 * v for k, v in value.items()} if isinstance(value, Mapping) else 2 * value
        for name, value in values.items()
    }
    return replace(gpu, **doubled)
