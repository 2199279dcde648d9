"""Several processes of one program: started by torchrun, timed together."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from microbench.timing.clock import MIN_US, Timing, other_ops, summarise

CALLS = 4  # of a collective between two barriers
BETWEEN = 4  # rounds of other ops before each, about half a millisecond each
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
# torch's profiler then detaches CUPTI after a session: launches stay as cheap as they were
ON_A_GPU = {"TEARDOWN_CUPTI": "1", "PYTHONUNBUFFERED": "1"}


def start_ranks(
    module: str,
    order: Mapping[str, Any],
    ranks: int,
    torchrun: str = "",
    log: Path | None = None,
) -> subprocess.Popen[bytes]:
    """``python -m module ORDER``, or that under torchrun where there are several ``ranks``.

    ``torchrun`` are its arguments for several nodes; without them all ranks are on this one. The
    process leads a group of its own and ends with this one; what it prints is added to ``log``.
    """
    launcher = [sys.executable, "-m", "microbench.processes.leash"]
    together = ranks > 1 or bool(torchrun)
    if together:
        where = shlex.split(torchrun) or ["--standalone"]
        launcher += ["torch.distributed.run", *where, f"--nproc-per-node={ranks}"]
        launcher += ["-m", "microbench.processes.leash"]
    environment = os.environ | (QUIET if together else {})
    if together or order.get("device") == "cuda":
        environment = {"OMP_NUM_THREADS": "1", **environment}
    if order.get("device") == "cuda":
        environment = {**environment, **ON_A_GPU}
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


def join(device: str) -> tuple[int, int]:
    """Enter the process group torchrun describes; (rank, world size)."""
    import torch  # lazy: orders are made without torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size()


def agree(value: int) -> int:
    """Rank 0's value on every rank."""
    import torch  # lazy, as above
    import torch.distributed as dist

    box = torch.tensor([value], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(box, src=0)
    return int(box.item())


def slowest(samples: list[float]) -> list[float]:
    """Sample by sample the largest of all ranks."""
    import torch  # lazy, as above
    import torch.distributed as dist

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    box = torch.tensor(samples, dtype=torch.float64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return [float(x) for x in box.tolist()]


def time_together(run: Callable[[], object], device: str) -> Timing:
    """A collective's time on the slowest rank: on GPUs as nccl-tests, on CPUs as in a step."""
    return _times_in_a_row(run) if device == "cuda" else _times_in_a_step(run)


def _times_in_a_row(run: Callable[[], object], target_s: float = 0.03) -> Timing:
    """Mean device time of a few calls in a row, 5 to 40 times, a barrier before each."""
    import torch.distributed as dist  # lazy, as above

    def once() -> float:
        dist.barrier()
        return _in_a_row_us(run)

    once()
    first_us = slowest([once()])[0]
    repetitions = min(40, max(5, int(target_s * 1e6 / max(first_us, 1.0))))
    return summarise(slowest([once() for _ in range(repetitions)]))


def _times_in_a_step(run: Callable[[], object], target_s: float = 0.15) -> Timing:
    """What a call adds to other ops of a few milliseconds, 4 to 8 times, a barrier before each.

    After a barrier all ranks and their threads are awake, and a call takes a third of what it does
    in a step: there ranks arrive at different times and threads sleep.
    """
    import torch.distributed as dist  # lazy, as above

    other = other_ops()

    def nothing() -> None:
        """The baseline."""

    def once(last: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            for _ in range(BETWEEN):
                other()
            last()
        return (time.perf_counter_ns() - start) / 1e3

    once(run)
    first_us = slowest([once(run)])[0]
    repetitions = min(8, max(4, int(target_s * 1e6 / max(first_us, 1.0))))
    both = [(once(run), once(nothing)) for _ in range(repetitions)]
    with_us, without_us = slowest([t for t, _ in both]), slowest([t for _, t in both])
    alone_us = summarise(without_us).time_us
    return summarise([max(MIN_US, t - alone_us) / CALLS for t in with_us])


def _in_a_row_us(run: Callable[[], object], calls: int = 5) -> float:
    """Device time of a call between CUDA events around several; the host waits for the end."""
    import torch  # lazy, as above

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / calls
