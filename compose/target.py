"""Finds device, plan, node, host and software by their names, and forecasts a step on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from itercast.capture.base.extensions import function_of
from itercast.capture.input.lane import InputLane
from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import Forecast, forecast
from itercast.compose.machines.factors import NONE, Factors
from itercast.compose.machines.file import KnownMachine
from itercast.compose.machines.state import Machine
from itercast.compose.machines.typical import typical
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing.layer_prices import PricedModel, price_model
from itercast.compose.pricing.price_book import PriceBook, price_book
from itercast.learners.bundle import Bundle
from itercast.learners.known_bundles import find_bundle, find_gpu
from itercast.microbench.hardware.host import REFERENCE, USUAL, HostMachine, load_host
from itercast.microbench.hardware.names import gpu_named
from itercast.microbench.hardware.node import Node, load_node
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.hardware.stack import USUAL as USUAL_STACK
from itercast.microbench.hardware.stack import load_stack


def find_node(plan: ParallelPlan, gpu: Gpu) -> Node | None:
    """The node that a plan names, or None; ValueError if it holds other GPUs than ``gpu``."""
    if not plan.node:
        return None
    node = load_node(plan.node)
    if gpu.kind == "cpu" and node.gpu == "cpu":
        return node
    if gpu.name not in node.gpus:
        holds = " or ".join(node.gpus)
        raise ValueError(f"plan {str(plan)!r}: node {node.name!r} holds {holds}, not {gpu.name}")
    return replace(node, gpu=gpu.name)


def find_host(name: str, gpu: Gpu) -> HostMachine:
    """The host of a GPU by its name or file; the usual one where none is named.

    A CPU is its own host: its events are measured with its ops.
    """
    if gpu.kind != "cpu":
        return load_host(name or USUAL, gpu.architecture)
    if name:
        raise ValueError(f"host {name!r}: {gpu.name} is a CPU, which is its own host")
    return REFERENCE


def find_stack(name: str, gpu: Gpu) -> str:
    """The software to forecast: as named, else the usual one; on a CPU the measured torch."""
    if name:
        load_stack(name)  # or say which are known
        return name
    return "torch" if gpu.kind == "cpu" else USUAL_STACK


def step_dtype(asked: str | None, amp: bool, gpus: Iterable[Gpu]) -> str | None:
    """The dtype of a step on these GPUs: as asked, or the usual one of mixed precision.

    That is bf16, or fp16 where a GPU has no units for bf16. ValueError where it is as wide as the
    weights of mixed precision are.
    """
    if amp and asked in ("fp32", "tf32", "fp64"):
        raise ValueError(f"amp: dtype is bf16 or fp16, got {asked!r}")
    if asked or not amp:
        return asked
    lacking = any(gpu.kind == "gpu" and "bf16" not in gpu.peak_flops_per_s for gpu in gpus)
    return "fp16" if lacking else "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The bundle, device, plan, node, host and software that a forecast is for.

    ``threads``: CPU threads of each rank; 0 on a GPU. ``known``: what measured steps say of the
    machine; None: it is a typical one. ``model``: the name of the model, which may be slower or
    faster on it than others. ``lane``: the DataLoader that feeds each rank; None where batches are
    always there.
    """

    bundle: Bundle
    bundle_name: str
    gpu: Gpu
    plan: ParallelPlan
    threads: int
    node: Node | None
    host: HostMachine = REFERENCE
    stack: str = USUAL_STACK
    known: Machine | None = None
    model: str = ""
    lane: InputLane | None = None

    @property
    def machine(self) -> Factors:
        """The machine's factors: as known, else a typical machine's."""
        if self.gpu.kind == "cpu":
            return NONE
        return (self.known or typical()).factors(self.model)

    @property
    def book(self) -> PriceBook:
        """The prices of ops on it, shared by all plans."""
        return price_book(self.bundle, self.gpu, self.threads, self.stack, self.host).on(
            self.machine, self.known, self.model
        )

    def priced(self, step: StepCapture) -> PricedModel:
        """The step's layers with prices, on a rank of the plan."""
        cluster = cluster_for(self.plan, self.gpu, self.node)
        return price_model(step, self.plan, self.book, cluster)


def find_target(
    gpu: str = "cpu",
    plan: str | ParallelPlan = "",
    bundle: Path | None = None,
    host: str = "",
    stack: str = "",
    machine: KnownMachine | None = None,
    model: str = "",
) -> Target:
    """The target by the names of its device, plan, bundle, host and software.

    ``machine``: what measured steps said of the machine, and of ``model`` on it.
    """
    parsed = ParallelPlan.parse(plan) if isinstance(plan, str) else plan
    gpu = gpu_named(gpu) or gpu
    folder, models = find_bundle(gpu, bundle)
    device = find_gpu(gpu, models)
    if machine is not None and machine.gpu != device.name:
        raise ValueError(
            f"measured steps are of {machine.gpu} (--machine, --anchor), not of {device.name}"
        )
    return Target(
        bundle=models,
        bundle_name=str(folder),
        gpu=device,
        plan=parsed,
        threads=max(1, device.sm_count // parsed.cpu_ranks) if device.kind == "cpu" else 0,
        node=find_node(parsed, device),
        host=find_host(host, device),
        stack=find_stack(stack, device),
        known=machine.machine if machine else None,
        model=model,
    )


def forecast_step(step: StepCapture, target: Target) -> Forecast:
    """Forecast an iteration from a captured step, whose batch is one micro-batch of the plan."""
    found = forecast(step, target.plan, target.book, target.node, target.bundle_name)
    if target.lane is None:
        return found
    samples = step.samples * target.plan.microbatches
    fed: Forecast = function_of("inputs", "with_input")(found, target.lane, target, samples)
    return fed
