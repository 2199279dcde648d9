"""How long a workload takes: warm and cold, with the machine's speed at that moment."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from microbench.ops.family import Workload
from microbench.ops.step.small_ops import small_ops

WARM_TIME_S = 0.008
WARM_SAMPLES = (5, 9)
COLD_SAMPLES = 3
MIN_US = 0.5  # of a run: no op is cheaper


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


def _elapsed_us(run: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e3


def _sample_us(workload: Workload, before: Callable[[], object]) -> float:
    """One call right after ``before``, less one of the baseline's after another.

    Taken in turns, since what is timed first after a flush or a large op finds colder caches.
    """
    before()
    time_us = _elapsed_us(workload.run)
    if workload.baseline is not None:
        before()
        time_us -= _elapsed_us(workload.baseline)
    return time_us


def time_warm_cpu(workload: Workload, disturb: Callable[[], object]) -> Timing:
    """Operands in cache, code not: before each sample ``disturb`` runs other ops, as a step would.

    In a tight loop of one op its code and branch history stay hot and small ops look twice too
    cheap.
    """
    workload.run()
    first_us = max(_elapsed_us(workload.run), 0.1)
    low, high = WARM_SAMPLES
    count = min(high, max(low if first_us < 2e4 else 3, int(WARM_TIME_S * 1e6 / first_us)))
    return summarise([_sample_us(workload, disturb) for _ in range(count)])


def time_cold_cpu(
    workload: Workload, flush: Callable[[], object], disturb: Callable[[], object]
) -> Timing:
    """One call after each flush of the operands; ``disturb`` brings common code back."""

    def before() -> None:
        flush()
        disturb()

    return summarise([_sample_us(workload, before) for _ in range(COLD_SAMPLES)])


def other_ops() -> Callable[[], object]:
    """Small ops of many kinds, about 0.5 ms: what a step runs between two ops of a kind.

    Ops inserted into real steps took about as long as after these, twice as long as in a loop.
    """
    run = small_ops("cpu")

    def disturb() -> None:
        for one in run:
            one()

    return disturb


class CallCost:
    """What Python costs around a timed call: nothing at all, and ``torch.ops.aten``'s wrapper.

    Cold, that wrapper takes longer than a small op; ``warmed`` calls one right before. Running
    medians of one sample per point, since a shared machine changes speed.
    """

    def __init__(self, disturb: Callable[[], object]) -> None:
        import torch  # lazy: summaries must work where torch is absent

        x, aten = torch.ones(8), torch.ops.aten

        def warmed() -> None:
            disturb()
            aten.neg(x)

        self.before = {False: disturb, True: warmed}  # by through_aten
        self._runs: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (disturb, lambda: None),
            (disturb, lambda: torch.relu(x)),
            (warmed, lambda: aten.relu(x)),
        ]
        self._samples: deque[list[float]] = deque(maxlen=31)
        for _ in range(31):
            self.sample()

    def sample(self) -> None:
        """One sample more; the oldest is forgotten."""
        times = []
        for before, run in self._runs:
            before()
            times.append(_elapsed_us(run))
        self._samples.append(times)

    def us(self, through_aten: bool) -> float:
        """What to take off a timed call."""
        columns = zip(*self._samples, strict=True)
        nothing, bound, wrapped = (float(statistics.median(c)) for c in columns)
        return nothing + (max(0.0, wrapped - bound) if through_aten else 0.0)


class Clock:
    """Times workloads on the CPU, warm and cold."""

    def __init__(self, cache_bytes: float) -> None:
        import torch  # lazy: summaries must work where torch is absent

        self._flush = torch.zeros(int(1.5 * cache_bytes) // 4).sum
        self._call_cost = CallCost(other_ops())

    def time(self, workload: Workload, cache: str) -> Timing:
        """``cache`` is warm (operands where the last call left them) or cold (flushed)."""
        before = self._call_cost.before[workload.through_aten]
        if cache == "cold":
            timing = time_cold_cpu(workload, self._flush, before)
        else:
            timing = time_warm_cpu(workload, before)
            self._call_cost.sample()
        less_us = 0.0 if workload.baseline else self._call_cost.us(workload.through_aten)
        return Timing(
            time_us=max(timing.time_us - less_us, MIN_US) / workload.calls,
            time_us_p20=max(timing.time_us_p20 - less_us, MIN_US) / workload.calls,
            time_us_p80=max(timing.time_us_p80 - less_us, MIN_US) / workload.calls,
            samples=timing.samples,
        )


class Anchor:
    """Two fixed small jobs whose times tell how fast a shared CPU is right now.

    ``anchor_us`` is a matrix product on all threads, ``serial_us`` a row of views on the calling
    one: cores of a shared machine slow down one by one, and small ops run on one of them.
    """

    def __init__(self) -> None:
        import torch  # lazy: summaries must work where torch is absent

        a, x = torch.randn(192, 192), torch.ones(1)

        def views() -> None:
            for _ in range(20):
                x.view(1, 1)

        self._jobs = {"anchor_us": lambda: torch.mm(a, a), "serial_us": views}

    def times_us(self) -> dict[str, float]:
        """Medians of five after three more, hot whatever ran before; takes about 1 ms."""
        found = {}
        for name, job in self._jobs.items():
            for _ in range(3):
                job()
            found[name] = statistics.median(_elapsed_us(job) for _ in range(5))
        return found


def geometric_means(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """Of the values under each name."""
    return {name: (first[name] * second[name]) ** 0.5 for name in first}
