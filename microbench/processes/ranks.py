"""Starts a program as one process or, by torchrun, as several ranks, and times collectives."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from itercast.capture.base.cores import cores
from itercast.capture.base.slow_imports import dist, torch
from itercast.microbench.processes.child_processes import START, ended_with_this
from itercast.microbench.processes.lanes import visible_gpus
from itercast.microbench.store import Facts
from itercast.microbench.timing.clock import MIN_US, Timing, summarise

SAMPLES, MOST_CALLS = 8, 8  # of a collective on CPUs; calls of each
BACK_TO_BACK_US = 3e4  # of all samples of a collective on GPUs, of DEVICE_CALLS calls each
BETWEEN_LAYERS_US = 3e5  # the same on CPUs, of each rank
DEVICE_CALLS = 5
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
# TEARDOWN_CUPTI: torch's profiler detaches CUPTI after a session, which would slow launches
ON_A_GPU = {"TEARDOWN_CUPTI": "1", "PYTHONUNBUFFERED": "1"}


def threads_of(ranks: int) -> int:
    """Threads of each of several ranks on this CPU: all cores divided, at least one."""
    return max(1, cores() // ranks)


def start_ranks(
    module: str, order: Facts, ranks: int, torchrun: str = "", log: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start ``python -m module ORDER``, under torchrun where there are several ``ranks``.

    ``torchrun``: its arguments for several nodes; without them all ranks are on this node. The
    process leads a process group and is killed when this process ends; ``log`` gets its output.
    One of several lanes sees the GPU of its number only.
    """
    launcher = [sys.executable, "-m", START]
    several = ranks > 1 or bool(torchrun)
    if several:
        where = shlex.split(torchrun) or ["--standalone"]
        launcher += ["torch.distributed.run", *where, f"--nproc-per-node={ranks}"]
        launcher += ["-m", START]
    environment = os.environ | ended_with_this() | (QUIET if several else {})
    if several or order.get("device") == "cuda":
        environment = {"OMP_NUM_THREADS": "1", **environment}
    if order.get("device") == "cuda":
        environment = {**environment, **ON_A_GPU}
    if order.get("lanes", 1) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = visible_gpus()[order["lane"]]
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") if log else nullcontext() as output:
        return subprocess.Popen(
            [*launcher, module, json.dumps(order)],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def join_process_group(device: str) -> tuple[int, int]:
    """Join the process group that torchrun describes; returns (rank, world size).

    Who joins calls ``dist.destroy_process_group`` at the end: gloo's threads that still run when a
    process exits abort it now and then.
    """
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size()


def rank0_value(value: int) -> int:
    """Broadcasts rank 0's value: returns it on every rank."""
    tensor = torch.tensor([value], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(tensor, src=0)
    return int(tensor.item())


def max_over_ranks(samples: list[float]) -> list[float]:
    """The maximum over all ranks, sample by sample."""
    return _over_ranks(samples, dist.ReduceOp.MAX)


def _over_ranks(samples: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    """Maximum, minimum or sum over all ranks, sample by sample."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(samples, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op)
    return [float(x) for x in tensor.tolist()]


def time_collective(run: Callable[[], object], device: str, waits: bool = True) -> Timing:
    """Times a collective: on GPUs back to back on its slowest rank, on CPUs between layers.

    On GPUs nccl-tests measures so too; on CPUs a collective of a step meets ranks that arrive at
    different times. ``waits``: each rank waits for all others, so that their waiting is part of it.
    """
    return _back_to_back(run) if device == "cuda" else _between_layers(run, waits)


def _back_to_back(run: Callable[[], object]) -> Timing:
    """Mean device time of DEVICE_CALLS back to back; 5 to 40 samples, a barrier before each."""

    def once() -> float:
        dist.barrier()
        return _device_us(run)

    once()
    first_us = max_over_ranks([once()])[0]
    repetitions = min(40, max(5, int(BACK_TO_BACK_US / max(first_us, 1.0))))
    return summarise(max_over_ranks([once() for _ in range(repetitions)]))


def _between_layers(run: Callable[[], object], waits: bool) -> Timing:
    """Time of a call in us between layers of a few ms; SAMPLES samples, each a mean of calls.

    Means, as a few calls wait long for other ranks and a step has the sum of its calls. It is the
    mean over ranks or, if it should not include waiting (``waits``), on the rank that arrives last.
    """
    layer = _layer()

    def once() -> float:
        layer()
        start = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start) / 1e3

    once()
    start = time.perf_counter_ns()
    once()
    taken_us = max_over_ranks([(time.perf_counter_ns() - start) / 1e3])[0]
    calls = min(MOST_CALLS, max(1, int(BETWEEN_LAYERS_US / SAMPLES / taken_us)))
    reduction = dist.ReduceOp.SUM if waits else dist.ReduceOp.MIN
    times_us = _over_ranks([once() for _ in range(SAMPLES * calls)], reduction)
    divisor = calls * (dist.get_world_size() if waits else 1)
    return summarise([max(MIN_US, sum(times_us[i::SAMPLES]) / divisor) for i in range(SAMPLES)])


def _layer() -> Callable[[], object]:
    """The ops of a small layer, a few ms."""
    x, up, down = torch.randn(256, 512), torch.randn(512, 1024), torch.randn(1024, 512)
    functional = torch.nn.functional
    return lambda: functional.layer_norm(x + functional.gelu(x @ up) @ down, (512,))


def _device_us(run: Callable[[], object]) -> float:
    """Device time per call, between CUDA events around five calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(DEVICE_CALLS):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / DEVICE_CALLS
