"""Measured iterations: how steps run, on machines that are shared, watched, or break."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clockwork import ticking
from torch.nn import functional

from itercast.capture.cases.registry import case
from itercast.capture.recorder.attention import attention_as, eager_attention
from itercast.capture.step import BACK_TO_BACK
from itercast.microbench.iterations import worker
from itercast.microbench.iterations.engines import captured_in_graph
from itercast.microbench.iterations.measure import Iteration, _StepTimer, measure_iteration
from itercast.microbench.iterations.measured_plan import PlanStep
from itercast.microbench.iterations.worker import IterationOrder
from itercast.microbench.ops.memory.fused import Fused, build
from itercast.microbench.processes.watch import EXIT_BROKEN
from itercast.microbench.store import read_journal
from itercast.microbench.timing import gpu_watch
from itercast.microbench.timing.gpu_watch import GpuWatch


def order_of(root: Path, batches: tuple[int, ...], **more: Any) -> IterationOrder:
    """An order to measure an MLP with these batches on a CPU."""
    asked = tuple(Iteration(case="mlp-s", batch=n) for n in batches)
    fixed: dict[str, Any] = {"run_id": "run", "device": "cpu", "gpu": "toy", "threads": 1}
    fixed |= {"ranks": 1, "repeat": 4, "rounds": 2, "iterations": asked}
    return IterationOrder(root=str(root), **{**fixed, **more})


@pytest.mark.parametrize(
    ("memory", "turns"),
    [
        (1e15, [(1, 4), (2, 4), (3, 4), (1, 5), (2, 5), (3, 5)]),
        (0.0, [(1, 4), (2, 4), (1, 5), (2, 5), (3, 4), (3, 5)]),  # room for one process
    ],
)
def test_iterations_take_turns_in_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: float, turns: list[tuple[int, int]]
) -> None:
    """Two iterations to a process."""
    monkeypatch.setattr(worker, "memory_bytes", lambda: memory)
    monkeypatch.setattr(worker, "TOGETHER", 2)
    worker.run(order_of(tmp_path, (1, 2, 3)))
    rows = read_journal(tmp_path / ".journal/run.jsonl")
    assert [(row["batch"], row["repeat"]) for row in rows] == turns
    assert all(row["samples"] >= 2 and row["anchor_us"] > 0 for row in rows)
    assert not multiprocessing.active_children()


def test_a_worker_ends_as_its_fork_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "case_of", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(SystemExit) as ended:
        worker.run(order_of(tmp_path, (2,)))
    assert ended.value.code == -signal.SIGKILL


def test_rows_that_are_there_are_not_measured_again(tmp_path: Path) -> None:
    order = order_of(tmp_path, (1, 2))
    done = worker.iteration_key(replace(order, repeat=5), order.iterations[0])
    worker.run(replace(order, done=(done,)))
    rows = read_journal(tmp_path / ".journal/run.jsonl")
    assert [(row["batch"], row["repeat"]) for row in rows] == [(1, 4), (2, 4), (2, 5)]


class Driver:
    """Stands in for NVML: readings and energy as told."""

    def __init__(self, *readings: dict[str, Any], energies_j: tuple[float, ...] = ()) -> None:
        self.readings, self.energies_j = iter(readings), iter(energies_j)

    def read(self) -> dict[str, Any]:
        return next(self.readings, {})

    def energy_j(self) -> float | None:
        return next(self.energies_j, None)


def test_a_gpu_is_seen_as_it_is_during_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """1200 J in 2 s are 600 W, whatever single readings say."""
    now = [10.0]
    monkeypatch.setattr(gpu_watch.time, "monotonic", lambda: now[0])
    clocks = ({"sm_clock_hz": hz, "power_w": 100.0} for hz in (1.9e9, 1.4e9, 1.5e9))
    why = ("", "power_cap", "power_cap sw_thermal")
    readings = [{**c, "throttle": t} for c, t in zip(clocks, why, strict=True)]
    driver: Any = Driver(*readings, energies_j=(0.0, 5000.0, 6200.0))
    watch = GpuWatch(driver)
    watch.begin()
    assert watch.due()
    for _ in readings:
        watch.read()
    assert not watch.due()
    now[0] += 2.0
    assert watch.due()
    assert watch.facts() == {
        "sm_clock_hz": 1.5e9,
        "sm_clock_hz_min": 1.4e9,
        "power_w": 600.0,
        "throttle": "power_cap sw_thermal",
    }


def test_steps_that_are_watched_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading takes a minute of a clock that ticks by itself; no step's time has it."""
    clock = ticking(monkeypatch)

    class Slow(Driver):
        def read(self) -> dict[str, Any]:
            clock["ns"] += 60 * 10**9
            return {"sm_clock_hz": 1e9}

    driver: Any = Slow()
    asked = Iteration(case="mlp-s", batch=2)
    row = measure_iteration(case("mlp-s"), asked, "cpu", repetitions=3, watch=GpuWatch(driver))
    assert row["sm_clock_hz"] == row["sm_clock_hz_min"] == 1e9
    assert row["time_us_p20"] == row["time_us_p80"] == 6 * 0.1e6  # 5 phases


def test_steps_back_to_back_are_timed_by_their_ends_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPU takes 5 ms a step, the host launches in no time: 5 ms, and one wait at the end."""
    done_ms, waits = [0.0], [0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at_ms = 0.0

        def record(self) -> None:
            done_ms[0] += 5.0
            self.at_ms = done_ms[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    def synchronize() -> None:
        waits[0] += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    ran = list[int]()
    step = PlanStep(run=lambda: ran.append(1))
    timer = _StepTimer(step, [], "cuda", False, None, None, one_by_one=False)
    assert timer._times(3) == ([5000.0] * 3, {})
    assert (len(ran), waits) == (4, [1])  # the first interval begins behind a step, too


def test_only_steps_on_one_gpu_are_timed_back_to_back() -> None:
    asked = Iteration(case="mlp-s", batch=2, timing=BACK_TO_BACK)
    with pytest.raises(NotImplementedError, match="on one GPU only"):
        measure_iteration(case("mlp-s"), asked, "cpu")
    with pytest.raises(ValueError, match="allowed are synchronised, back_to_back"):
        Iteration(case="mlp-s", batch=2, timing="sometimes")


@pytest.mark.parametrize(
    ("engine", "status", "ends"),
    [("graph", "error", True), ("eager", "error", False), ("graph", "ok", False)],
)
def test_a_failed_engine_ends_the_worker_after_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, status: str, ends: bool
) -> None:
    """A graph that was not captured may leave the random generator in capture mode."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(uuid="none")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = {"op": "train_step", "engine": engine, "status": status, "reason": ""}
    monkeypatch.setattr(worker, "measure_iteration", lambda *_, **__: dict(found))
    asked = tuple(Iteration(case="mlp-s", batch=n, engine=engine) for n in (1, 2))
    order = IterationOrder(
        root=str(tmp_path),
        run_id="run",
        device="cuda",
        gpu="toy",
        threads=0,
        ranks=1,
        repeat=0,
        iterations=asked,
    )
    if ends:
        with pytest.raises(SystemExit) as ended:
            worker.run(order)
        assert ended.value.code == EXIT_BROKEN
    else:
        worker.run(order)
    rows = read_journal(tmp_path / ".journal/run.jsonl")
    assert [row["status"] for row in rows] == [status] * (1 if ends else 2)


def test_attention_written_out_computes_the_same() -> None:
    """Causal, four heads over two of keys and values."""
    q, k, v = (torch.randn(2, heads, 8, 16) for heads in (4, 2, 2))
    options = {"is_causal": True, "enable_gqa": True}
    whole = functional.scaled_dot_product_attention(q, k, v, **options)
    with attention_as("eager"):
        written = functional.scaled_dot_product_attention(q, k, v, **options)
    assert functional.scaled_dot_product_attention is not eager_attention
    torch.testing.assert_close(written, whole)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_an_iteration_is_measured_with_the_attention_asked_for(attn: str) -> None:
    chosen, seen = case("gpt-s"), set()

    def loss(logits: Any, given: dict[str, Any]) -> Any:
        seen.add(functional.scaled_dot_product_attention is eager_attention)
        return chosen.loss(logits, given)

    asked = Iteration(case="gpt-s", batch=1, seq=8, attn=attn)
    row = measure_iteration(replace(chosen, loss=loss), asked, "cpu", repetitions=1)
    assert row["status"] == "ok"
    assert seen == {attn == "eager"}


def test_a_graph_keeps_what_its_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's graphs own what they allocate, not the parameters and inputs made before."""
    replays: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    stand_ins: dict[str, Any] = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda chosen: nullcontext(),
        "graph": lambda chosen: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: replays.append("replay")),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def make_step() -> tuple[Callable[[], None], weakref.ref[torch.nn.Module]]:
        model = torch.nn.Linear(2, 2)

        def step() -> None:
            model(torch.ones(1, 2))

        return step, weakref.ref(model)

    step, model = make_step()
    replay = captured_in_graph(step, "cuda", warmup=1)
    del step
    gc.collect()
    replay()
    assert replays == ["replay"]
    assert model() is not None


def test_model_and_loss_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``itercast.compose.graph.launch_modes`` fuses both."""
    chosen, compiled = case("mlp-s"), []

    def note(what: Any) -> Any:
        compiled.append(what)
        return what

    monkeypatch.setattr(torch, "compile", note)
    asked = Iteration(case="mlp-s", batch=2, engine="compile")
    assert measure_iteration(chosen, asked, "cpu", repetitions=1)["status"] == "ok"
    assert len(compiled) == 2
    assert isinstance(compiled[0], torch.nn.Module) and compiled[1] is chosen.loss


def test_every_fused_point_of_a_chunk_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are built before the first runs; of one code object torch compiles only eight."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    one = {"numel": 64, "read_bytes": 256, "written_bytes": 256}
    for workload in [build(Fused(ops=n, **one), "cpu") for n in range(1, 10)]:
        workload.run()
    assert len(graphs) == 9
