"""Data parallelism as PyTorch DDP does it: gradient buckets, reduced while backward goes on.

Overlap: a bucket's all-reduce starts after the backward call that made its last gradient, on one
comm lane in bucket order; the optimizer waits for all. While an all-reduce and compute overlap both
proceed at 1/contention of their speed (``timeline.simulate_shared``). The factor is stated, not
learned: 1.0 on GPUs (copy engines and few SMs), 2.0 on a CPU, where both run on the same cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from compose.priced import UNMODELLED, PricedOp, Pricer
from microbench.hardware.spec import Gpu
from microbench.opcall import ParamSpec

DEFAULT_BUCKET_BYTES = 25 * 2**20  # DDP's default
FIRST_BUCKET_BYTES = 2**20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
RANKS_PER_NODE = 8  # assumption until node files say otherwise
NETWORK_BYTES_PER_S = 25e9  # assumption: one 200 Gb/s port per GPU between nodes
ALPHA_US = {"gpu": 8.0, "cpu": 30.0}  # assumption: one message's latency, NCCL and Gloo
CPU_COPIES = 8  # assumption: a byte through Gloo's loopback moves eight times through memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients reduced together; ready after call number ``ready_after`` of the step."""

    message_bytes: int
    dtype: str
    ready_after: int
    names: tuple[str, ...]


def default_contention(gpu: Gpu) -> float:
    """2.0 on a CPU, 1.0 on GPUs: stated, see the top of this file."""
    return 2.0 if gpu.kind == "cpu" else 1.0


def buckets(
    parameters: Sequence[ParamSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> list[Bucket]:
    """Buckets in the order their gradients become ready, as DDP rebuilds them after a step.

    A bucket closes with the gradient that reaches its limit: 1 MiB for the first (where the
    default of 25 MiB is kept), then ``bucket_bytes``; one dtype per bucket. Parameters without a
    gradient (``ready_after`` < 0) are left out.
    """
    small_first = bucket_bytes == DEFAULT_BUCKET_BYTES
    first = FIRST_BUCKET_BYTES if small_first else bucket_bytes
    open_: dict[str, list[ParamSpec]] = {}
    limit: dict[str, int] = {}
    closed: list[list[ParamSpec]] = []
    for p in sorted((p for p in parameters if p.ready_after >= 0), key=lambda p: p.ready_after):
        members = open_.setdefault(p.dtype, [])
        members.append(p)
        if sum(m.nbytes for m in members) >= limit.get(p.dtype, first):
            closed.append(open_.pop(p.dtype))
            limit[p.dtype] = bucket_bytes
    closed += open_.values()
    found = [
        Bucket(
            message_bytes=sum(m.nbytes for m in members),
            dtype=members[0].dtype,
            ready_after=members[-1].ready_after,
            names=tuple(m.name for m in members),
        )
        for members in closed
    ]
    return sorted(found, key=lambda b: b.ready_after)


def all_reduce_us(message_bytes: int, world_size: int, gpu: Gpu) -> float:
    """Ring all-reduce without a model: 2(n-1) alpha + 2(n-1)/n * S / beta.

    beta is the GPU's fast link, else PCIe, at most the network's rate where ranks span nodes; on a
    CPU the memory bandwidth over ``CPU_COPIES``.
    """
    if gpu.kind == "cpu":
        beta = gpu.hbm_bytes_per_s / CPU_COPIES
    else:
        beta = gpu.link_bytes_per_s or gpu.pcie_bytes_per_s or NETWORK_BYTES_PER_S
        if world_size > RANKS_PER_NODE:
            beta = min(beta, NETWORK_BYTES_PER_S)
    n = world_size
    alpha = ALPHA_US["cpu" if gpu.kind == "cpu" else "gpu"]
    return 2 * (n - 1) * alpha + 2 * (n - 1) / n * message_bytes / beta * 1e6


def price_buckets(
    found: Sequence[Bucket], pricer: Pricer, gpu: Gpu, dp: int, threads: int
) -> list[PricedOp]:
    """The all-reduce of each bucket alone on the machine: family 'collective' where it has a model.

    Elsewhere ``all_reduce_us``, counted as unmodelled and right within a factor of two.
    """
    if not found:
        return []
    if "collective" not in pricer.models:
        guesses = [all_reduce_us(b.message_bytes, dp, gpu) for b in found]
        return [_reduce(UNMODELLED, t, t / 2, t * 2, inside=False) for t in guesses]
    facts = {
        "op": "all_reduce",
        "world_size": dp,
        "ranks_per_node": dp if gpu.kind == "cpu" else min(dp, RANKS_PER_NODE),
        "node": gpu.name,
        "gpu": gpu.name,
        "threads": threads,
        "cache": "warm",
    }
    rows = pd.DataFrame(
        {**facts, "message_bytes": b.message_bytes, "dtype": b.dtype} for b in found
    )
    table = pricer.price("collective", rows, {gpu.name: gpu})
    columns = ["predicted_us", "predicted_us_p10", "predicted_us_p90", "in_envelope"]
    return [
        _reduce("collective", float(t), float(low), float(high), inside=bool(inside))
        for t, low, high, inside in table[columns].itertuples(index=False)
    ]


def _reduce(family: str, us: float, low_us: float, high_us: float, *, inside: bool) -> PricedOp:
    return PricedOp(
        op="all_reduce",
        family=family,
        phase="backward",
        duration_us=us,
        low_us=low_us,
        high_us=high_us,
        flops=0.0,
        in_envelope=inside,
    )
