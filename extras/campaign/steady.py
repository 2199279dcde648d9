"""A worker that measures what a GPU sustains: products run for seconds, and copies.

``python -m itercast.extras.campaign.steady ORDER`` writes a row for each job to a journal. Rows of
products are of family ``sustained`` (``of``: gemm), those of copies of family ``transfer``.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from itercast.capture.base.slow_imports import dist, torch
from itercast.capture.base.yaml_text import facts_of
from itercast.microbench import store
from itercast.microbench.ops import families
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.store import Row
from itercast.microbench.sweep.captured_points import read_points
from itercast.microbench.sweep.rows import Order, failure, make_row
from itercast.microbench.timing.clock import summarise
from itercast.microbench.timing.gpu_watch import GpuWatch
from itercast.microbench.timing.nvml import Nvml

FACTS = facts_of(__file__)
SUSTAINED, TRANSFER = "sustained", "transfer"
SETTLED_FRAC = 0.5  # of a product's seconds, after which clocks have settled


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyOrder(Order):
    """What a worker measures: ``kind`` sustained or transfer, within a budget of seconds.

    ``points``: a file of points whose products are sustained, the first ones first.
    """

    kind: str
    budget_s: float
    points: str = ""
    done: Sequence[str] = ()  # keys of rows that are there


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A copy of ``nbytes``: h2d, d2h or d2d, or a collective of NCCL among one rank, which copies.

    ``pinned``: the host's memory is page-locked; ``beside``: a product runs meanwhile.
    """

    op: str
    nbytes: int
    pinned: bool = True
    beside: bool = False
    dtype: str = "bf16"


def run(order: SteadyOrder) -> None:
    """Measure the order's jobs one after the other; a job that fails is a row, too."""
    journal = store.Journal(Path(order.root), order.run_id)
    watch = GpuWatch(Nvml(str(torch.cuda.get_device_properties(0).uuid)))
    end_s = (order.begin_s or time.monotonic()) + order.budget_s
    jobs = _products(order, watch) if order.kind == SUSTAINED else _transfers()
    for params, measure in jobs:
        row: Row = {"family": order.kind, "gpu": order.gpu, "threads": 0, "cache": order.kind}
        key = store.point_key({**row, "repeat": 0, "point": params})
        if key in order.done:
            continue
        if time.monotonic() + FACTS["needed_s"][order.kind] > end_s:
            break
        try:
            measured = {"status": "ok", **measure()}
        except Exception as exc:  # any failure becomes a row
            measured = failure(exc)
        facts: Row = {"family": order.kind, "params": params, "repeat": 0, "key": key}
        journal.append([make_row(order, timer=order.kind, measured=measured, **facts)])
        gc.collect()
        torch.cuda.empty_cache()


def _products(order: SteadyOrder, watch: GpuWatch) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Products of the file by flops, largest first of each dtype in turn."""
    listed = read_points(Path(order.points), "gemm") if order.points else []
    by_dtype: dict[str, list[Gemm]] = {}
    for p in sorted(listed, key=lambda p: -p.m * p.n * p.k * p.batch):
        by_dtype.setdefault(p.dtype, []).append(p)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_dtype.values()))
    for p in filter(None, turns):
        yield {"of": "gemm", **asdict(p)}, partial(sustained, p, watch)


def sustained(p: Gemm, watch: GpuWatch) -> Row:
    """Time of a product that runs for seconds without a pause, once clocks have settled.

    ``alone_us``: the shortest of a few calls before; clocks and power as during the last calls.
    """
    torch.backends.cuda.matmul.allow_tf32 = p.dtype == "tf32"
    call = families()["gemm"].build(p, "cuda").run
    call()
    alone_us = min(_times(call, FACTS["alone_calls"]))
    count = max(2, int(1e6 * FACTS["seconds"] / max(alone_us, 1.0)))
    settling = int(SETTLED_FRAC * count)
    for _ in range(settling):
        call()
    watch.begin()
    times = _times(call, count - settling, watch)
    return {**watch.facts(), **asdict(summarise(times)), "alone_us": alone_us}


def _times(
    call: Callable[[], object], count: int, watch: GpuWatch | None = None, each: int = 1
) -> list[float]:
    """GPU times in us of a call, by events after every ``each`` of ``count`` calls in a row."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count // each + 1)]
    ends[0].record()
    for end in ends[1:]:
        for _ in range(each):
            call()
        end.record()
    if watch is not None:
        watch.read()
    torch.cuda.synchronize()
    return [1e3 * end.elapsed_time(next_end) / each for end, next_end in itertools.pairwise(ends)]


def _transfers() -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Copies of all sizes, page-locked and not, alone and beside a product; then NCCL's."""
    sizes = [int(mib * 2**20) for mib in FACTS["mib"]]
    listed = [
        Transfer(op=op, nbytes=n, pinned=pinned, beside=beside)
        for n in sizes
        for op in ("h2d", "d2h", "d2d")
        for pinned in ((True, False) if op != "d2d" else (True,))
        for beside in (False, True)
    ]
    listed += [Transfer(op=op, nbytes=n) for op in FACTS["collectives"] for n in sizes]
    for t in listed:
        yield asdict(t), partial(transfer, t)


def transfer(t: Transfer) -> Row:
    """Times of a copy on a stream of its own.

    Beside a product also ``product_us`` and ``product_beside_us``: the mean time of a square bf16
    product alone, and while the copies run.
    """
    copy = _collective(t) if t.op in FACTS["collectives"] else _copy(t)
    copy()
    torch.cuda.synchronize()
    if not t.beside:
        return asdict(summarise(_times(copy, FACTS["copies"])))
    n = FACTS["beside"]  # rows and columns of the product
    a = torch.randn(n, n, dtype=torch.bfloat16, device="cuda")
    products = max(1, int(FACTS["copies"] * min(_times(copy, 3)) / min(_times(lambda: a @ a, 3))))
    alone_us = min(_times(lambda: a @ a, products, each=products))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(FACTS["copies"] + 1)]
        ends[0].record()
        for end in ends[1:]:
            copy()
            end.record()
    slowed_us = min(_times(lambda: a @ a, products, each=products))
    torch.cuda.synchronize()
    times = [1e3 * end.elapsed_time(next_end) for end, next_end in itertools.pairwise(ends)]
    return {**asdict(summarise(times)), "product_us": alone_us, "product_beside_us": slowed_us}


def _copy(t: Transfer) -> Callable[[], object]:
    """A call that copies between host and GPU, or within the GPU."""
    on_gpu = torch.empty(t.nbytes, dtype=torch.uint8, device="cuda")
    if t.op == "d2d":
        other = torch.empty_like(on_gpu)
        return lambda: other.copy_(on_gpu, non_blocking=True)
    on_host = torch.zeros(t.nbytes, dtype=torch.uint8)
    on_host = on_host.pin_memory() if t.pinned else on_host
    target, source = (on_gpu, on_host) if t.op == "h2d" else (on_host, on_gpu)
    return lambda: target.copy_(source, non_blocking=t.pinned)


def _collective(t: Transfer) -> Callable[[], object]:
    """A collective of one rank: NCCL copies the buffer within the GPU."""
    nccl: Any = dist
    if not nccl.is_initialized():
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ.update(variables)
        dist.init_process_group("nccl", store=nccl.HashStore(), rank=0, world_size=1)
    x = torch.zeros(t.nbytes // 2, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_into_tensor(y, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(y, x),
    }
    return calls[t.op]


if __name__ == "__main__":
    from itercast.extras.campaign import steady  # the module that others see

    steady.run(steady.SteadyOrder(**json.loads(sys.argv[1])))
