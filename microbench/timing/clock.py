"""Times a workload on the CPU, with warm and cold caches, and the CPU's speed at that moment."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from itercast.capture.base.slow_imports import torch
from itercast.microbench.hardware.machine import MIB, TOUCHED_MIB, scratch_bytes, touched_others
from itercast.microbench.ops.family import Workload
from itercast.microbench.ops.step.small_ops import small_ops
from itercast.microbench.timing.operands import rewritten_by_one_core

WARM_TIME_S = 0.008
WARM_SAMPLES = (5, 9)
COLD_SAMPLES = 3
NowNs = Callable[[], int]
FLUSHED = 0.95  # no assumption: share of cold access, of data touched once in a lap
# no assumption: a lap through more than a cache finds nothing in it; as replacement is by chance in
# part, a single flush needs several times as many bytes (four: 97 % of an update on a Xeon)
FLUSH_OVER_LAP = 4.0
INTERRUPTED = 2.0  # no assumption: times the median; what takes longer met other work
MIN_US = 0.5  # lower bound of a measured time: no op is faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median, mean, 20th and 80th percentile of samples, in microseconds."""

    time_us: float
    time_us_mean: float
    time_us_p20: float
    time_us_p80: float
    samples: int


def usual_mean(samples: Sequence[float]) -> float:
    """Mean of samples, each moved to at least 0 and at most INTERRUPTED times the median.

    A step takes the sum of its ops' means: their medians add up to less, as an op is often a little
    slower than usual and never much faster. With differences of two noisy times a median may be
    negative; then it is the result.
    """
    median = statistics.median(samples)
    if median <= 0:
        return median
    return statistics.fmean(min(max(s, 0.0), INTERRUPTED * median) for s in samples)


def summarise(samples_us: list[float]) -> Timing:
    """Median, mean (``usual_mean``) and percentiles (nearest rank) of samples."""
    ordered = sorted(samples_us)
    last = len(ordered) - 1
    return Timing(
        time_us=statistics.median(ordered),
        time_us_mean=usual_mean(ordered),
        time_us_p20=ordered[round(0.2 * last)],
        time_us_p80=ordered[round(0.8 * last)],
        samples=len(ordered),
    )


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, as a caching allocator does, which avoids page faults.

    Sets M_MMAP_MAX to 0 and M_TRIM_THRESHOLD to its largest value (man 3 mallopt); does nothing
    with other C libraries.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    libc.mallopt(-4, 0)
    libc.mallopt(-1, 2**31 - 1)


def clock_of(threads: int) -> NowNs:
    """The clock that times ops on ``threads`` threads.

    For one thread it is the thread's CPU time, which leaves out time in which other processes have
    the core. For several threads it is wall time, as they wait for each other.
    """
    return time.thread_time_ns if threads == 1 else time.perf_counter_ns


def _elapsed_us(run: Callable[[], object], now_ns: NowNs) -> float:
    """Time of one call in us by the given clock."""
    start = now_ns()
    run()
    return (now_ns() - start) / 1e3


def _sample_us(workload: Workload, before: Callable[[], object], now_ns: NowNs) -> float:
    """Time of one call right after ``before``, minus that of the baseline after another ``before``.

    The baseline has a ``before`` of its own, as the first call after one finds colder caches than
    the next.
    """
    before()
    time_us = _elapsed_us(workload.run, now_ns)
    if workload.baseline is not None:
        before()
        time_us -= _elapsed_us(workload.baseline, now_ns)
    return time_us


def time_warm_cpu(workload: Workload, disturb: Callable[[], object], now_ns: NowNs) -> Timing:
    """Time with operands in cache; before each sample ``disturb`` runs other ops, as in a step.

    In a tight loop of one op its code and branch history stay in caches, and small ops take half as
    long as in a step.
    """
    workload.run()
    first_us = max(_elapsed_us(workload.run, now_ns), 0.1)
    low, high = WARM_SAMPLES
    count = min(high, max(low if first_us < 2e4 else 3, int(WARM_TIME_S * 1e6 / first_us)))
    return summarise([_sample_us(workload, disturb, now_ns) for _ in range(count)])


def other_ops() -> Callable[[], object]:
    """Small ops of many kinds that take 0.5 ms, like the ops of a step between two of one kind.

    Ops inserted into real steps took about as long as after these, and twice as long as in a loop.
    """
    ops = small_ops("cpu")

    def disturb() -> None:
        for op in ops:
            op()

    return disturb


class CallCost:
    """Measures what Python adds to a timed call: an empty call, and ``torch.ops.aten``'s wrapper.

    With cold caches the wrapper takes longer than a small op, so ``warmed`` calls one right before.
    The cost is the ``usual_mean`` of the latest samples, one per point, as a shared machine changes
    its speed.
    """

    def __init__(self, disturb: Callable[[], object], now_ns: NowNs = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        x, aten = torch.ones(8), torch.ops.aten

        def warmed() -> None:
            disturb()
            aten.neg(x)

        # What runs before a timed call, by whether it goes through torch.ops.aten's wrapper.
        self.before = {False: disturb, True: warmed}
        # Timed: nothing, torch's own binding of an op, and the wrapper of the same op.
        self._runs: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (disturb, lambda: None),
            (disturb, lambda: torch.relu(x)),
            (warmed, lambda: aten.relu(x)),
        ]
        self._samples: deque[list[float]] = deque(maxlen=31)
        for _ in range(31):
            self.sample()

    def sample(self) -> None:
        """Take one more sample and drop the oldest."""
        times = []
        for before, run in self._runs:
            before()
            times.append(_elapsed_us(run, self._now_ns))
        self._samples.append(times)

    def us(self, through_aten: bool) -> float:
        """Time to subtract from a timed call."""
        columns = zip(*self._samples, strict=True)
        empty, bound, wrapped = map(usual_mean, columns)
        return empty + (max(0.0, wrapped - bound) if through_aten else 0.0)


class Clock:
    """Times workloads on the CPU with warm and cold caches, by the clock for ``threads`` threads.

    Caches are flushed as the hardware's ``cold_share`` was measured, by which a forecast mixes both
    times: other data are read and written, as many as it takes until hardly anything is warm. That
    can be less than the stated size of caches that other machines' users share, or a multiple.
    All ``ranks`` flush at the same time; together they leave most of the memory free.
    """

    def __init__(self, threads: int, cold_share: Mapping[str, float], ranks: int = 1) -> None:
        self._now_ns, self._cores = clock_of(threads), threads
        flushing_mib = (float(mib) for mib, share in cold_share.items() if share >= FLUSHED)
        least_mib, most_mib = min(flushing_mib, default=TOUCHED_MIB[-1]), TOUCHED_MIB[-1]
        self._flush_mib = min(FLUSH_OVER_LAP * least_mib, most_mib, scratch_bytes(ranks) / MIB)
        self._call_cost = CallCost(other_ops(), self._now_ns)

    @cached_property
    def _flush(self) -> Callable[[], object]:
        return touched_others(self._flush_mib)

    def time_warm(self, workload: Workload) -> Timing:
        """Time a workload with its operands in cache, where one core of several wrote them."""
        warm_code = self._before(workload)
        rewrite = None if self._cores == 1 else rewritten_by_one_core(workload.run)

        def prepare() -> None:
            if rewrite:
                rewrite()
            warm_code()

        timing = time_warm_cpu(workload, prepare, self._now_ns)
        self._call_cost.sample()
        return self._of_one_call(timing, workload)

    def time_cold(self, pairs: Sequence[tuple[Workload, Workload | None]]) -> list[Timing]:
        """Time the first workload of each pair, whose operands are in no cache.

        Its twin, the same op with other operands, runs after the flush, as in a step an op of this
        kind ran before: code is warm, data are cold. What the twin returns is kept, so that the
        result gets cold memory, too. A flush serves all pairs, as none has data of another.
        """
        samples_us: list[list[float]] = [[] for _ in pairs]
        for lap in range(1 + COLD_SAMPLES if pairs else 0):  # the first gets memory for results
            self._flush()
            for samples, (workload, twin) in zip(samples_us, pairs, strict=True):
                kept = twin.run() if twin else None
                time_us = self._timed_us(workload, workload.run)
                del kept
                baseline_us = (
                    self._timed_us(workload, workload.baseline) if workload.baseline else 0.0
                )
                if lap:
                    samples.append(time_us - baseline_us)
        return [
            self._of_one_call(summarise(samples), workload)
            for samples, (workload, _) in zip(samples_us, pairs, strict=True)
        ]

    def _timed_us(self, workload: Workload, run: Callable[[], object]) -> float:
        """Time of a run of the workload or its baseline, with its code warm."""
        self._before(workload)()
        return _elapsed_us(run, self._now_ns)

    def _before(self, workload: Workload) -> Callable[[], object]:
        """What runs before a timed call, so that the code it needs is as warm as in a step."""
        return self._call_cost.before[workload.through_aten]

    def _of_one_call(self, timing: Timing, workload: Workload) -> Timing:
        """A timing per call of the workload, without what Python adds to a timed call."""
        overhead_us = 0.0 if workload.baseline else self._call_cost.us(workload.through_aten)
        times_us = asdict(timing)
        samples = times_us.pop("samples")
        per_call = {n: max(us - overhead_us, MIN_US) / workload.calls for n, us in times_us.items()}
        return Timing(**per_call, samples=samples)


class Anchor:
    """Two fixed jobs whose times show how fast a shared CPU is at the moment.

    ``anchor_us``: a matrix product on all threads. ``serial_us``: views on the calling thread, as
    cores of a shared machine slow down one by one and small ops run on a single one. Timed by the
    clock of so many ``threads``.

    Each runs often enough before it is timed not to depend on what ran before: after three runs the
    product took longer behind a training step than behind small ops, on an equally fast machine.
    """

    def __init__(self, threads: int = 0) -> None:
        self._now_ns = clock_of(threads)
        matrix, scalar = torch.randn(192, 192), torch.ones(1)

        def twenty_views() -> None:
            for _ in range(20):
                scalar.view(1, 1)

        self._jobs = {"anchor_us": lambda: torch.mm(matrix, matrix), "serial_us": twenty_views}

    def times_us(self) -> dict[str, float]:
        """Medians of nine runs after 24 untimed ones, whatever ran before; takes about 5 ms."""
        medians_us = {}
        for name, job in self._jobs.items():
            for _ in range(24):
                job()
            medians_us[name] = statistics.median(_elapsed_us(job, self._now_ns) for _ in range(9))
        return medians_us
