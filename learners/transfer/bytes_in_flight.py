"""Corrects forecasts for GPUs without rows by how many bytes their threads can have in flight.

By Little's law a rate of bytes needs rate * latency bytes in flight. Threads of a copy, a norm or a
sum have a few elements each in flight, so that a full GPU moves at most

    limit = SMs * threads per SM * bytes per thread / latency

and with the peak of its memory: rate = 1 / sqrt(1 / peak^2 + 1 / limit^2). Latency is about the
same on all GPUs: the faster the memory, the less of its peak such kernels reach. Matrix products,
convolutions and attention copy tiles into shared memory ahead of their use: they are not limited.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from itercast.learners.features.table import LAUNCH_FLOOR_US, bounds_us, columns
from itercast.learners.transfer.query_rows import QueryRows
from itercast.learners.transfer.source_gpus import SourceGpus
from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.hardware.stack import software_name, software_version
from itercast.microbench.opcall import ITEMSIZE_BYTES
from itercast.microbench.ops.family import Family, Values

LATENCY_NS: float = assumed(__file__, "latency_ns")
THREADS_PER_SM: int = assumed(__file__, "threads_per_sm")
VECTOR_BYTES: int = assumed(__file__, "vector_bytes")
OLD_TORCH = assumed(__file__, "old_torch")


def correction(query: QueryRows, source_gpus: SourceGpus) -> np.ndarray:
    """Factors on forecasts that come from rows of other GPUs; 1 for rows of measured GPUs.

    factor = (``slowdown`` of this GPU / ``slowdown`` of its source GPUs) ** share. The sources'
    slowdown is their weighted geometric mean; share = memory / (compute + memory + launch floor) of
    an op's bounds, so that only memory-bound ops are corrected in full.
    """
    factors, family = np.ones(len(query.gpu)), query.family
    unseen = source_gpus.unseen(query)
    if family.matmul or not source_gpus.measured or not unseen.any():
        return factors
    where = np.flatnonzero(unseen)
    asked = query.take(where)
    for rows, group in asked.groups:
        gpu, moved = query.gpus[group.gpu], bytes_per_thread(group.dtype, group.wanted)
        log_ratio = np.log(slowdown(gpu, moved))
        for (name, _), weight in source_gpus.weights(group, gpu, family).items():
            log_ratio -= weight * np.log(slowdown(source_gpus.gpus[name], moved))
        share = _memory_share(asked.rows.iloc[rows], family, gpu)
        factors[where[rows]] = np.exp(log_ratio * share)
    return factors


def slowdown(gpu: Gpu, thread_bytes: float) -> float:
    """Peak bandwidth / the rate that threads with ``thread_bytes`` in flight reach; 1 on a CPU."""
    if gpu.kind == "cpu":
        return 1.0
    needed = gpu.hbm_bytes_per_s * LATENCY_NS * 1e-9
    return float(np.hypot(1.0, needed / (gpu.sm_count * THREADS_PER_SM * thread_bytes)))


def bytes_per_thread(dtype: str, stack: str) -> float:
    """Bytes that a thread reads and writes at a time: one vector each.

    A vector is VECTOR_BYTES; in torch before the release of OLD_TORCH, some elements of any size.
    """
    vector = float(VECTOR_BYTES)
    version = software_version(stack)
    if software_name(stack) == "torch" and version and version < tuple(OLD_TORCH["before"]):
        vector = min(vector, OLD_TORCH["elements"] * ITEMSIZE_BYTES.get(dtype, VECTOR_BYTES))
    return 2 * vector


def _memory_share(rows: pd.DataFrame, family: Family, gpu: Gpu) -> Values:
    """memory / (compute + memory + launch floor) of each row's bounds in us."""
    compute_us, memory_us = bounds_us(family, columns(rows, family), gpu, 0)
    return memory_us / (compute_us + memory_us + LAUNCH_FLOOR_US[gpu.kind])
