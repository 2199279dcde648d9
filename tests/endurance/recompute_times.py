"""Times steps under recomputation budgets, as torch's selective checkpoints run them.

``python tests/endurance/recompute_times.py CASE,CASE... BUNDLE`` on an idle CPU. Plans take turns
in windows of 4 steps: a window is judged by its ratio to that without recomputation just before.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from itercast.capture.cases.registry import case
from itercast.capture.step import StepSettings, make_step
from itercast.compose.capture_model import capture
from itercast.compose.target import checkpoint_policy, find_target, forecast_step
from itercast.microbench.iterations.plan_steps import checkpoint_layers, places_by_layer
from itercast.microbench.timing.clock import keep_freed_memory

PLANS = ("", *(f"recompute=budget:{share}" for share in (0.3, 0.5, 0.7)), "recompute=full")
STEPS, ROUNDS = 4, 8


def forecast(name: str, plan: str, bundle: Path) -> tuple[float, Callable[[], None]]:
    """The forecast of a plan in us, and the step that runs its policy."""
    chosen, captured = case(name), capture(name)
    target = find_target("cpu", plan, bundle)
    model, inputs = chosen.build(), chosen.inputs(chosen.batch, chosen.seq)
    if plan:
        checkpoint_layers(model, places_by_layer(checkpoint_policy(captured, target)))
    step = make_step(model, inputs, chosen.loss, StepSettings())
    return forecast_step(captured, target).iteration_us, step


def window_us(step: Callable[[], None]) -> float:
    """Time of a step, over some of them."""
    start_ns = time.perf_counter_ns()
    for _ in range(STEPS):
        step()
    return (time.perf_counter_ns() - start_ns) / 1e3 / STEPS


def main(names: str, bundle: str) -> None:
    """Print a line for each case and plan, and the mean error."""
    keep_freed_memory()
    errors = []
    for name in names.split(","):
        made = {plan: forecast(name, plan, Path(bundle)) for plan in PLANS}
        times: dict[str, list[float]] = {plan: [] for plan in PLANS}
        ratios: dict[str, list[float]] = {plan: [] for plan in PLANS}
        gc.collect()
        gc.disable()
        for turn in range(1 + ROUNDS):
            for plan, (_, step) in made.items():
                pair = window_us(made[""][1]), window_us(step)
                if turn:
                    times[plan].append(pair[1])
                    ratios[plan].append(pair[1] / pair[0])
        for plan, (forecast_us, _) in made.items():
            pairs = (
                (statistics.median(times[plan]) / 1e3, forecast_us / 1e3),
                (statistics.median(ratios[plan]), forecast_us / made[""][0]),
            )
            errors.append(abs(pairs[0][1] / pairs[0][0] - 1))
            told = (f"{m:6.3f}, forecast {f:6.3f}: {100 * (f / m - 1):+5.1f} %" for m, f in pairs)
            print(f"{name} {plan or 'none':20} ms {'; of none '.join(told)}", flush=True)
        gc.enable()
    print(f"mean error {100 * statistics.mean(errors):.1f} %, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main(*sys.argv[1:])
