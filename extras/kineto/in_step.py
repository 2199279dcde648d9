"""Measures ops inside training steps: each op of profiled steps as a row, by torch.profiler.

The rows are those that the importer of Kineto traces makes of a user's trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial

from itercast.capture.base.slow_imports import torch
from itercast.capture.cases.registry import EvalCase
from itercast.extras.kineto.ops import answered, describe
from itercast.extras.kineto.rows import rows_of_calls
from itercast.microbench import store
from itercast.microbench.iterations.measure import Iteration, prepared_step
from itercast.microbench.iterations.worker import IN_STEP, IterationOrder
from itercast.microbench.ops import families
from itercast.microbench.store import Row
from itercast.microbench.sweep.rows import failure, make_row
from itercast.microbench.timing.traces import host_times, join, record

OPS = "in_step_ops"  # the family of the ops of profiled iterations
STEPS = 3
WARMUP = 3


def measure_ops(
    order: IterationOrder, case: EvalCase, iteration: Iteration
) -> tuple[Row, Iterator[Row]]:
    """Profile steps of an iteration; returns the columns of its row, and the rows of its ops."""
    measured, rows = measure_in_step(case, iteration, order.device)
    return measured, op_rows(order, iteration, rows)


def measure_in_step(
    case: EvalCase, iteration: Iteration, device: str
) -> tuple[Row, Mapping[str, list[Row]]]:
    """Profile steps of an iteration; returns the columns of its row, and its ops' rows by family.

    An op's time is the time of its kernels, on a CPU its time on the host. ``time_us`` is the sum
    over a step's ops, ``known_frac`` the share of it that families describe.
    """
    from itercast.capture.recorder.attention import attention_as  # needs torch

    try:
        with attention_as(iteration.attn):
            step = prepared_step(case, iteration, device)
            for _ in range(WARMUP):
                step()
            trace = record(partial(_steps, step, device), on_gpu=device == "cuda", shapes=True)
    except Exception as exc:  # any failure becomes a row, as where an engine is not supported
        return failure(exc), {}
    per_call = join(trace, answered)[0] if device == "cuda" else host_times(trace, answered)
    rows, _ = rows_of_calls(trace, per_call)
    described = [
        index for index in per_call if describe(trace.ops[index].name, trace.ops[index].args)
    ]
    total_us = sum(per_call.values())
    described_frac = sum(per_call[index] for index in described) / total_us if total_us else 0.0
    measured = {"time_us": total_us / STEPS, "samples": STEPS, "known_frac": described_frac}
    return {"status": "ok", **measured}, rows


def _steps(step: Callable[[], None], device: str) -> None:
    """Run the profiled steps to their end on the device."""
    for _ in range(STEPS):
        step()
    if device == "cuda":
        torch.cuda.synchronize()


def op_rows(
    order: IterationOrder, iteration: Iteration, rows: Mapping[str, list[Row]]
) -> Iterator[Row]:
    """Rows of ops with the iteration that they were part of, and how often a step calls them.

    They form a family of their own (the op's is in ``of``), so that models of ops that run alone do
    not learn from them.
    """
    in_iteration = {f"in_{name}": value for name, value in asdict(iteration).items()}
    for family, of_family in rows.items():
        names = [f.name for f in fields(families()[family].params)]
        for row in of_family:
            params = {name: row[name] for name in names}
            key = {"family": OPS, "gpu": order.gpu, "threads": order.threads, "cache": IN_STEP}
            point = {"of": family, **params, **in_iteration}
            yield make_row(
                order,
                family=OPS,
                params={"of": family, **params},
                repeat=order.repeat,
                key=store.point_key({**key, "repeat": order.repeat, "point": point}),
                timer=IN_STEP,
                measured={**row, **in_iteration, "status": "ok", "calls": row["samples"] / STEPS},
            )
