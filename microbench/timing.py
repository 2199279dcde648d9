"""How long a workload takes: warm and cold, with the machine's speed at that moment."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from microbench.ops.family import Workload

WARM_TIME_S = 0.02
MAX_SAMPLES = 30
COLD_SAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median, 20th and 80th percentile of the samples, in microseconds."""

    time_us: float
    time_us_p20: float
    time_us_p80: float
    samples: int


def summarise(samples_us: list[float]) -> Timing:
    """Median and p20/p80 of raw samples (nearest rank)."""
    ordered = sorted(samples_us)
    last = len(ordered) - 1
    return Timing(
        time_us=statistics.median(ordered),
        time_us_p20=ordered[round(0.2 * last)],
        time_us_p80=ordered[round(0.8 * last)],
        samples=len(ordered),
    )


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, as a caching allocator does: no page faults in steady state.

    M_MMAP_MAX=0 and a large M_TRIM_THRESHOLD (man 3 mallopt); does nothing on other C libraries.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    libc.mallopt(-4, 0)
    libc.mallopt(-1, 2**31 - 1)


def _elapsed_us(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        run()
    return (time.perf_counter_ns() - start) / 1e3 / calls


def time_warm_cpu(run: Callable[[], object]) -> Timing:
    """Repeat on the same operands; calls under 50 us are timed in groups."""
    run()
    first_us = max(_elapsed_us(run, 1), 0.1)
    calls = max(1, int(50 / first_us))
    repetitions = min(MAX_SAMPLES, max(3, int(WARM_TIME_S * 1e6 / (first_us * calls))))
    return summarise([_elapsed_us(run, calls) for _ in range(repetitions)])


def time_cold_cpu(run: Callable[[], object], flush: Callable[[], object]) -> Timing:
    """One call after each flush of the caches."""
    samples_us = []
    for _ in range(COLD_SAMPLES):
        flush()
        samples_us.append(_elapsed_us(run, 1))
    return summarise(samples_us)


def time_cuda(run: Callable[[], object], flush: Callable[[], object] | None) -> Timing:
    """Device time between CUDA events; ``flush`` evicts L2 before each sample."""
    import torch  # lazy: summaries must work where torch is absent

    for _ in range(3):
        run()
    repetitions = 10
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repetitions)
    ]
    for begin, end in pairs:
        if flush is not None:
            flush()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return summarise([begin.elapsed_time(end) * 1e3 for begin, end in pairs])


class Clock:
    """Times workloads on one device, warm and cold."""

    def __init__(self, device: str, cache_bytes: float) -> None:
        import torch  # lazy: summaries must work where torch is absent

        self.device = device
        self._buffer = torch.zeros(int(1.5 * cache_bytes) // 4, device=device)
        self._flush = self._buffer.zero_ if device == "cuda" else self._buffer.sum

    def time(self, workload: Workload, cache: str) -> Timing:
        """``cache`` is warm (operands where the last call left them) or cold (flushed)."""
        if self.device == "cuda":
            timing = time_cuda(workload.run, self._flush if cache == "cold" else None)
        elif cache == "cold":
            timing = time_cold_cpu(workload.run, self._flush)
        else:
            timing = time_warm_cpu(workload.run)
        return Timing(
            time_us=timing.time_us / workload.calls,
            time_us_p20=timing.time_us_p20 / workload.calls,
            time_us_p80=timing.time_us_p80 / workload.calls,
            samples=timing.samples,
        )


class Anchor:
    """A fixed small workload whose time tells how fast a shared CPU is right now."""

    def __init__(self) -> None:
        import torch  # lazy: summaries must work where torch is absent

        a, x = torch.randn(256, 256), torch.randn(2**18)
        self._compute = lambda: torch.mm(a, a)
        self._small = lambda: torch.add(x, x)

    def time_us(self) -> float:
        """Geometric mean of a product's and an addition's median time; takes about 2 ms."""
        compute = statistics.median(_elapsed_us(self._compute, 1) for _ in range(5))
        small = statistics.median(_elapsed_us(self._small, 1) for _ in range(5))
        return float((compute * small) ** 0.5)

    def reference_us(self) -> float:
        """The machine's fast state: the 20th percentile over about a second."""
        samples = []
        for _ in range(100):
            samples.append(self.time_us())
            time.sleep(0.008)
        return summarise(samples).time_us_p20
