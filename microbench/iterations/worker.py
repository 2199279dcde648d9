"""A worker process, or one rank of several, that measures iterations and journals their rows."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from itercast.capture.base.extensions import function_of
from itercast.capture.base.slow_imports import torch
from itercast.capture.cases.registry import EvalCase, case
from itercast.capture.step import SYNCHRONISED
from itercast.microbench import store
from itercast.microbench.hardware.machine import memory_bytes, resident_bytes
from itercast.microbench.iterations.measure import (
    BuiltIteration,
    Iteration,
    measure_iteration,
)
from itercast.microbench.processes.ranks import join_process_group
from itercast.microbench.processes.virtual_cores import VirtualCores
from itercast.microbench.processes.watch import EXIT_BROKEN, ending_on_full_disks
from itercast.microbench.store import Facts, Row
from itercast.microbench.sweep.rows import Order, make_row
from itercast.microbench.timing.clock import Anchor, keep_freed_memory
from itercast.microbench.timing.gpu_watch import GpuWatch
from itercast.microbench.timing.nvml import Nvml, is_throttled

IN_STEP = "in_step"  # the family of profiled iterations
MODELS_FRAC = 0.25  # of the memory, for models that take turns
VISIT = (2, 0.1)  # steps and seconds, at least, of an iteration in one of several rounds
TOGETHER = 5  # iterations in one process that take turns
# Seconds that an iteration takes: building it, 15 to 25 steps; torch.compile takes a minute
NEEDED_S = {"eager": 4.0, "graph": 5.0, "compile": 60.0, "compile+graph": 60.0}
ALWAYS_MEANT = (("engine", "eager"), ("timing", SYNCHRONISED))


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationOrder(Order):
    """What one worker, or each rank of a group, measures."""

    repeat: int
    iterations: tuple[Iteration, ...]
    rounds: int = 1  # on a CPU; in each, with a repeat of its own, all iterations take turns
    done: Sequence[str] = ()  # keys of rows that are there
    budget_s: float = math.inf  # no iteration is begun that would exceed it
    in_step: bool = False  # each op of profiled steps is a row, too
    cores: int = 0  # that the process is pinned to; 0: as the machine schedules it

    @property
    def family(self) -> str:
        """The family of iterations' rows; profiled ones, which take longer, have their own."""
        return IN_STEP if self.in_step else "iteration"


def iteration_key(order: IterationOrder, iteration: Iteration) -> str:
    """Returns the key that identifies an iteration's row.

    Columns at the one value that existed when older rows were measured are left out, so that keys
    of such rows stay the same.
    """
    row = {"family": order.family, "gpu": order.gpu, "threads": order.threads, "cache": "warm"}
    point = {k: v for k, v in asdict(iteration).items() if (k, v) not in ALWAYS_MEANT}
    return store.point_key({**row, "repeat": order.repeat, "point": point})


def iteration_row(order: IterationOrder, iteration: Iteration, measured: Facts) -> Row:
    """The dataset row of an iteration; ``measured`` has its status, times and more."""
    return make_row(
        order,
        family=order.family,
        params=asdict(iteration),
        repeat=order.repeat,
        key=iteration_key(order, iteration),
        timer="with_launch",
        measured={"op": "train_step", **measured},
    )


def run(order: IterationOrder) -> None:
    """Measure the iterations, on a GPU one after the other; rank 0 journals the rows.

    SystemExit where the process cannot use its GPU any more: after a sticky error, or after a CUDA
    graph that failed, as the random generator may stay in capture mode and every dropout fail.
    """
    torch.set_num_threads(max(1, order.threads))
    torch.manual_seed(0)
    if order.cores:
        pin(order.cores, order.lane)
    if order.device == "cpu":
        keep_freed_memory()
    rank = join_process_group(order.device)[0] if order.ranks > 1 else 0
    journal = store.Journal(Path(order.root), order.run_id) if rank == 0 else None
    (_one_by_one if order.rounds == 1 else _in_rounds)(order, journal)
    if order.ranks > 1:
        torch.distributed.destroy_process_group()


def _one_by_one(order: IterationOrder, journal: store.Journal | None) -> None:
    """Build, measure and free one iteration after the other, on a GPU within the budget."""
    ops = store.Journal(Path(order.root), f"{order.run_id}-ops") if order.in_step else None
    gpu = SingleGpu() if order.device == "cuda" else None
    anchor = None if gpu else Anchor().times_us
    cores = VirtualCores(order.ranks)
    end_s = (order.begin_s or time.monotonic()) + order.budget_s
    for iteration in order.iterations:
        if gpu and time.monotonic() + NEEDED_S[iteration.engine] > end_s:
            break
        begin_s, (chosen, facts) = time.monotonic(), case_of(order, iteration)
        if ops is not None:
            measured, rows = function_of("profiled_steps", "ops")(order, chosen, iteration)
            ops.append(rows)
        elif gpu:
            measured = measure_iteration(chosen, iteration, "cuda", watch=gpu.watch)
        else:
            cores.settle()
            measured = measure_iteration(chosen, iteration, "cpu", anchor=anchor)
        if gpu:
            measured = gpu.after(iteration, measured)
            measured |= {"cost_s": time.monotonic() - begin_s, "cores": order.cores}
        if journal is not None:
            journal.append([iteration_row(order, iteration, measured | facts)])
        if gpu and gpu.broken:
            raise SystemExit(EXIT_BROKEN)


def _in_rounds(order: IterationOrder, journal: store.Journal | None) -> None:
    """Measure all iterations in turn, round by round, as many as there is memory for.

    A shared machine is fast for some seconds and slow for some: iterations that take turns meet
    both alike, and the median over rounds is that of minutes.
    """
    waiting = list(order.iterations)
    while waiting:
        built, room_bytes = list[Built | BuiltApart](), MODELS_FRAC * memory_bytes() / order.ranks
        while waiting and (not built or sum(these.memory_bytes for these in built) < room_bytes):
            count = len(waiting) if order.ranks > 1 else TOGETHER
            some, waiting = waiting[:count], waiting[count:]
            built.append((Built if order.ranks > 1 else BuiltApart)(order, some))
        for repeat in range(order.repeat, order.repeat + order.rounds):
            for these in built:
                rows = these.rows(repeat)
                if journal is not None:
                    journal.append(rows)
        for these in built:
            these.close()


class Built:
    """Iterations that are built in this process, to take turns."""

    def __init__(self, order: IterationOrder, iterations: Sequence[Iteration]) -> None:
        anchor = Anchor().times_us
        self.order, self.cores = order, VirtualCores(order.ranks)
        self.built, self.facts = list[BuiltIteration](), list[Row]()
        for iteration in iterations:
            chosen, facts = case_of(order, iteration)
            self.built.append(BuiltIteration(chosen, iteration, "cpu", anchor=anchor))
            self.facts.append(facts)
        self.memory_bytes = resident_bytes()

    def rows(self, repeat: int) -> list[Row]:
        """Measure each once; returns the rows that are not there yet."""
        order, rows = replace(self.order, repeat=repeat), list[Row]()
        self.cores.settle()
        for one, facts in zip(self.built, self.facts, strict=True):
            if iteration_key(order, one.iteration) not in order.done:
                rows.append(iteration_row(order, one.iteration, one.measure(*VISIT) | facts))
        return rows

    def close(self) -> None:
        """Let go of the models."""
        for one in self.built:
            one.close()


class BuiltApart:
    """A few iterations that are built in a fork of this process, which measures them when asked.

    Beside thirty other models in the memory of one process small steps took a fifth longer.
    """

    def __init__(self, order: IterationOrder, iterations: Sequence[Iteration]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=_serve, args=(order, iterations, end), daemon=True)
        self.process.start()
        end.close()
        self.memory_bytes: float = self._answer()

    def rows(self, repeat: int) -> list[Row]:
        """Measure each once; returns the rows."""
        self.pipe.send(repeat)
        rows: list[Row] = self._answer()
        return rows

    def _answer(self) -> Any:
        """The fork's answer; SystemExit with its exit code if it failed, as it said why."""
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            raise SystemExit(self.process.exitcode) from None

    def close(self) -> None:
        """End the fork."""
        self.pipe.send(None)
        self.process.join()


def _serve(order: IterationOrder, iterations: Sequence[Iteration], pipe: Connection) -> None:
    """In a fork: build iterations, tell their memory, and measure each round that is asked for."""
    built = Built(order, iterations)
    pipe.send(built.memory_bytes)
    while (repeat := pipe.recv()) is not None:
        pipe.send(built.rows(repeat))


def case_of(order: IterationOrder, iteration: Iteration) -> tuple[EvalCase, Row]:
    """The iteration's case, and its row's column with the configuration of Hugging Face, if any.

    By the case's name, or a file below the root that describes the model.
    """
    path = Path(order.root) / iteration.case
    if path.suffix != ".json":
        return case(iteration.case), {}
    from itercast.capture.cases.external.huggingface import hf_case  # needs transformers

    chosen = hf_case(path, mode=iteration.mode, loss=iteration.loss, attn=iteration.attn)
    return chosen, {"hf_config": path.read_text()}


def pin(cores: int, lane: int) -> None:
    """Pin this process to a number of its cores, each lane to others, if the system can."""
    if hasattr(os, "sched_setaffinity"):
        own_cores = sorted(os.sched_getaffinity(0))
        begin = lane * cores % max(1, len(own_cores) - cores + 1)
        os.sched_setaffinity(0, own_cores[begin : begin + cores])


class SingleGpu:
    """Cleans up a GPU after each iteration: frees memory, marks rows taken while throttled."""

    def __init__(self) -> None:
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self.watch = GpuWatch(Nvml(uuid))
        self.broken = False

    def after(self, iteration: Iteration, measured: Row) -> Row:
        """Clean up; returns the columns with status throttled where the GPU was.

        Sets ``broken`` where the next iteration needs another process.
        """
        if measured["status"] == "ok" and is_throttled(measured):
            measured = {**measured, "status": "throttled"}
        failed = measured["status"] not in ("ok", "throttled")
        self.broken = failed and iteration.engine != "eager"
        try:
            if "compile" in iteration.engine:
                torch._dynamo.reset()
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        except RuntimeError:
            self.broken = True
        return measured


if __name__ == "__main__":
    fields: Row = json.loads(sys.argv[1])
    listed = tuple(Iteration(**values) for values in fields["iterations"])
    with ending_on_full_disks():
        run(IterationOrder(**{**fields, "iterations": listed}))
