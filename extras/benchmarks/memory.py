"""Compare peak memory of forecasts and of captured programs with torch's memory trackers.

`python -m itercast.extras.benchmarks.memory [CASE]...` runs it.

MemTracker (FSDPMemTracker for ZeRO) records the third step on a CPU, after two warm-up steps. FSDP2
runs as rank 0 of two in torch's fake process group, which sends nothing. The trackers do not see
DDP allocate its buckets, only the first gradient that is copied into each; so under DDP torch's
profiler counts what the CPU's allocator hands out from the start of the program.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Any

import typer
from rich.table import Table

from itercast.capture.base.slow_imports import dist, torch
from itercast.capture.cases.registry import EvalCase, case
from itercast.capture.opcall import Places, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.capture.programs.capture import capture_program
from itercast.capture.recorder.log import capture_step
from itercast.capture.step import StepSettings, make_optimizer
from itercast.compose.target import Target, forecast_step
from itercast.eval.tables import print_tables
from itercast.extras.checkpoints.layers import checkpoint_layers, places_by_layer
from itercast.extras.checkpoints.policy import checkpoint_policy
from itercast.extras.measured_plans.steps import parallel
from itercast.extras.processes import in_new_process
from itercast.extras.programs import run_program
from itercast.learners.bundle import Bundle
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.store import Facts

CASES = ("gpt-s", "llama-s", "bert-s", "vit-s", "moe-s", "dlrm-s", "gpt-m", "resnet-m")
THIRD_STEP = "third step"
PLANS = (
    "",
    "recompute=full",
    "recompute=budget:0.4",
    "recompute=budget:0.7",
    "dp=2",
    "dp=2,zero=2",
    "dp=2,zero=3",
)


def forecast_bytes(chosen: EvalCase, plan: str) -> int:
    """Forecast peak memory in bytes."""
    return forecast_step(*_step_and_target(chosen, plan)).memory_bytes


def _step_and_target(chosen: EvalCase, plan: str) -> tuple[StepCapture, Target]:
    """The captured step, and a GPU with an empty bundle: times do not matter."""
    captured = capture_step(
        chosen.build,
        lambda: chosen.inputs(chosen.batch, chosen.seq),
        chosen.loss,
        StepSettings(),
        samples=chosen.batch,
        tokens=chosen.batch * chosen.seq,
    )
    gpu = load_gpu("a100-sxm-80gb")
    bundle = Bundle(models={}, gpus={gpu.name: gpu})
    parsed = ParallelPlan.parse(plan)
    target = Target(bundle=bundle, bundle_name="", gpu=gpu, plan=parsed, threads=0, node=None)
    return replace(captured, optimizer="adamw"), target


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model in training, with its inputs: ``step`` runs a step."""

    model: Any
    optimizer: torch.optim.Optimizer
    inputs: Facts
    step: Callable[[], None]


def _saved_ops(chosen: EvalCase, plan: str) -> list[Places]:
    """The ops whose outputs each layer's checkpoint saves under a plan, instead of recomputing."""
    return places_by_layer(checkpoint_policy(*_step_and_target(chosen, plan)))


def _training(chosen: EvalCase, plan: str, saved: Sequence[Places]) -> Training:
    """A model parallelised by a plan, after two steps. A process group exists.

    ``saved``: the ops that each layer's checkpoint saves, if the plan recomputes.
    """
    parsed = ParallelPlan.parse(plan)
    inputs = chosen.inputs(chosen.batch, chosen.seq)
    model = chosen.build()
    if parsed.recompute:
        checkpoint_layers(model, saved)
    model, micro_batch = parallel(model, parsed, "cpu")
    optimizer = make_optimizer(list(model.parameters()), "adamw")

    def step() -> None:
        model.zero_grad()
        with micro_batch(True):
            chosen.loss(model(**inputs), inputs).backward()
        optimizer.step()

    for _ in range(2):
        step()
    model.zero_grad()
    return Training(model=model, optimizer=optimizer, inputs=inputs, step=step)


def captured_bytes(chosen: EvalCase, plan: str) -> int:
    """Peak memory in bytes of the same program's third step as it is captured."""
    saved = _saved_ops(chosen, plan)

    def program() -> Callable[[], None]:
        dist.init_process_group("gloo")
        return _training(chosen, plan, saved).step

    return capture_program(program, max(2, ParallelPlan.parse(plan).world_size), [0]).peak_bytes[0]


def tracked_bytes(chosen: EvalCase, plan: str) -> int:
    """Peak memory in bytes of the third step of rank 0, by torch's tracker or its allocator."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    parsed = ParallelPlan.parse(plan)
    zero = parsed.zero > 0
    if parsed.dp > 1 and not zero:
        return in_new_process(_allocated_bytes, chosen.name, plan)  # without earlier blocks
    _join(fake=zero)
    training = _training(chosen, plan, _saved_ops(chosen, plan))
    gc.collect()
    if zero:
        tracker: Any = FSDPMemTracker(training.model, training.optimizer)
        tracker.track_inputs((dict(training.inputs),))
    else:
        tracker = MemTracker()
        tracker.track_external(training.model, training.optimizer, *training.inputs.values())
    with tracker:
        training.step()
    dist.destroy_process_group()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _allocated_bytes(name: str, plan: str) -> int:
    """Peak bytes in the third step that torch's CPU allocator has handed out and not taken back."""
    from torch.profiler import ProfilerActivity, profile, record_function

    _join(fake=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        training = _training(case(name), plan, ())
        gc.collect()
        with record_function(THIRD_STEP):
            training.step()
    dist.destroy_process_group()
    events = sorted(run.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    start = next(i for i, e in enumerate(events) if e.name() == THIRD_STEP)
    totals = list(accumulate(e.nbytes() if e.name() == "[memory]" else 0 for e in events))
    return max(totals[start:])


def _join(*, fake: bool) -> None:
    """Join a process group: gloo with one rank, or torch's fake group as rank 0 of two.

    DDP does not run on the fake group.
    """
    from torch._C._distributed_c10d import HashStore
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    if fake:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def main(names: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Print a table of tracked, forecast and captured peak memory for the named cases."""
    table = Table("case", "plan", "torch's tracker MB", "forecast MB", "error %", "captured %")
    for name in names or CASES:
        for plan in PLANS:
            tracked = tracked_bytes(case(name), plan)
            forecast, captured = forecast_bytes(case(name), plan), captured_bytes(case(name), plan)
            sizes_mb = (f"{b / 1e6:.1f}" for b in (tracked, forecast))
            errors_pct = (f"{100 * (b / tracked - 1):+.1f}" for b in (forecast, captured))
            table.add_row(name, plan, *sizes_mb, *errors_pct)
    print_tables(table)


if __name__ == "__main__":
    run_program(main)
