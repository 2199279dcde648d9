"""Measure how long forecasts and plan searches for thousands of GPUs take, on one core.

`python -m itercast.extras.benchmarks.scale` runs it.
"""

from __future__ import annotations

import resource
import statistics
import time

from itercast.capture.base.slow_imports import without_scikit_learn
from itercast.extras.benchmarks.speed import fresh_folder, print_table
from itercast.extras.processes import in_new_process
from itercast.extras.programs import run_program
from itercast.microbench.store import Row

GPU = "h100-sxm-80gb"
MODEL = "gpt3-175b"
SEARCHED = "llama-8b"
SAMPLES = {64: 512, 1024: 2048}  # of 8,192 tokens in a step of the searched model, by GPUs
FIGURES = (  # target, and name in what ``measure`` and ``search_s`` return
    ("GPT-3 175B on 16,384 H100, capture and imports included, s", "<= 10", "first_s"),
    ("  of this CPU time, s", "", "first_cpu_s"),
    ("the next plan, s", "<= 0.1", "next_s"),
    ("  of this CPU time, s", "", "next_cpu_s"),
    ("most memory of all this, GB", "<= 2", "gb"),
    ("CPU time of a forecast on 100,000 GPUs over that on 24, times", "0.8 to 1.2", "growth"),
    ("plan search of GPT-3 175B on 1,024 GPUs, plans per CPU second", ">= 195", "plans_per_s"),
    ("plan search of Llama-3 8B on 64 GPUs, CPU seconds", "<= 12", "search_64"),
    ("plan search of Llama-3 8B on 1,024 GPUs, CPU seconds", "<= 20", "search_1024"),
)


@without_scikit_learn()  # as the command does
def measure(begin_s: float) -> dict[str, float]:
    """Times forecasts and a plan search in this fresh process, and its memory, as FIGURES names.

    ``begin_s`` is ``time.time()`` before the imports.
    """
    from itercast.compose.capture_model import capture
    from itercast.compose.plan_search.open_search import open_search
    from itercast.compose.plan_search.search import best_plans
    from itercast.compose.predict import predict

    step = capture(MODEL, batch=1, dtype="bf16")
    predict(step, gpu=GPU, plan="dp=128,tp=8,pp=16,micro=16")
    figures = {"first_s": time.time() - begin_s, "first_cpu_s": time.process_time()}
    start, start_cpu = time.perf_counter(), time.process_time()
    predict(step, gpu=GPU, plan="dp=64,tp=8,pp=32,micro=32")
    figures["next_s"] = time.perf_counter() - start
    figures["next_cpu_s"] = time.process_time() - start_cpu

    def forecast_cpu_s(dp: int) -> float:
        begin = time.process_time()
        predict(step, gpu=GPU, plan=f"dp={dp},tp=8,zero=1")
        return time.process_time() - begin

    forecast_cpu_s(2)
    # Other degrees each time, so that no forecast is repeated.
    pairs = [(forecast_cpu_s(1 + n), forecast_cpu_s(12_500 - n)) for n in range(2, 9)]
    few_s, many_s = (statistics.median(times_s) for times_s in zip(*pairs, strict=True))
    figures["growth"] = many_s / few_s
    settings: Row = {"global_batch": 1536, "seq": 2048, "dtype": "bf16"}
    search, _ = open_search(MODEL, GPU, 1024, node="dgx-h100", **settings)
    best_plans(search, 512, "time")  # captures and prices are there then
    start = time.process_time()
    plans = best_plans(search, 1024, "time")
    figures["plans_per_s"] = plans.considered / (time.process_time() - start)
    figures["gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return figures


def search_s(gpus: int) -> float:
    """CPU seconds of a plan search in this fresh process, without imports."""
    from itercast.compose.plan_search.open_search import open_search
    from itercast.compose.plan_search.search import best_plans

    settings: Row = {"global_batch": SAMPLES[gpus], "seq": 8192, "dtype": "bf16"}
    search, _ = open_search(
        SEARCHED, GPU, gpus, node="dgx-h100", bundle=None, optimizer="adamw", **settings
    )
    start = time.process_time()
    best_plans(search, gpus, "time")
    return time.process_time() - start


def main() -> None:
    """Print a table of measured times beside their targets, each of a fresh process."""
    with fresh_folder():
        figures = in_new_process(measure, time.time())
        figures |= {f"search_{gpus}": in_new_process(search_s, gpus) for gpus in SAMPLES}
    print_table("scale", [(what, target, f"{figures[key]:.2f}") for what, target, key in FIGURES])


if __name__ == "__main__":
    run_program(main)
