"""This machine's CPU and CUDA device as a ``Gpu``: the CPU's peaks are measured."""

from __future__ import annotations

import itertools
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.cores import cores, cpu_fact
from itercast.capture.base.slow_imports import torch
from itercast.microbench.hardware.names import gpu_named
from itercast.microbench.hardware.spec import Gpu, load_gpu, slug

MIB = 2.0**20
LAST_CACHE_BYTES = assumed(__file__, "last_cache_bytes")
FP64_PEAK_FRAC = assumed(__file__, "fp64_peak_frac")
FP32_FLOPS_PER_SM_AND_CLOCK = assumed(__file__, "fp32_flops_per_sm_and_clock")
PEAK_OVER_FP32 = assumed(__file__, "peak_over_fp32")
MEMORY_TRANSFERS_PER_CLOCK = assumed(__file__, "memory_transfers_per_clock")
# no assumption: sizes that are measured; the last one exceeds the caches of most sockets
TOUCHED_MIB = (0.125, *(2.0**n for n in range(-1, 11)))
ADD_MIB = 0.125  # no assumption: of one add: read and written, half each
COLD_ROUNDS = 5
COLD_LAPS_MIB = 16.0  # no assumption: at least so many MiB are timed of each size
SCRATCH_FRAC = 1 / 8  # of the machine's memory, for what measuring needs


def cpu_name() -> str:
    """Slug of the CPU model and the number of cores, e.g. intel-xeon-2.50ghz-2c."""
    return f"{slug(cpu_fact('model name') or platform.machine())}-{cores()}c"


def slow_dtypes() -> set[str]:
    """Dtypes of 16 bits for which this CPU has no instructions that torch's products could use."""
    checks = {"bf16": "_is_mkldnn_bf16_supported", "fp16": "_is_mkldnn_fp16_supported"}
    onednn = torch.backends.mkldnn.is_available()
    return {d for d, check in checks.items() if not (onednn and getattr(torch.ops.mkldnn, check)())}


def last_cache_bytes() -> float:
    """Size of the largest CPU cache in bytes; an assumed size where the system states none."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(float(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes, default=LAST_CACHE_BYTES)


def _best_s(run: Callable[[], object], repetitions: int) -> float:
    """The shortest wall time in s of ``repetitions`` runs."""
    best = float("inf")
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def touched_others(mib: float) -> Callable[[], object]:
    """A function that reads one half of ``mib`` MiB of other data and writes the other half."""
    source = torch.ones(int(mib * MIB / 8))
    target = torch.empty_like(source)
    return lambda: torch.mul(source, 1.0, out=target)


def memory_bytes() -> float:
    """Bytes of this machine's memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def resident_bytes() -> float:
    """Memory that this process uses; where the system does not say, the most it has used."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def scratch_bytes(processes: int = 1) -> float:
    """Memory that each of ``processes`` processes may use for data of its measurements."""
    return SCRATCH_FRAC * memory_bytes() / processes


def _touched_mib() -> list[float]:
    """Sizes of other data that this machine has memory for."""
    return [mib for mib in TOUCHED_MIB if mib * MIB <= scratch_bytes()]


def measure_cold_shares() -> tuple[dict[str, float], dict[str, float]]:
    """Measure how soon data leave this CPU's caches as other data are touched; takes 9 seconds.

    Returns ``Gpu.cold_share`` and ``cold_share_second`` by MiB touched between two uses of the
    data: of data that are used again and again, and of data that were in memory, at their second
    use (some caches keep what was used twice). Timed is a small add. A lap runs as many adds, each
    on data of its own, as touch these MiB together: as in a training step, all data are touched
    once before any is touched again. Rounds of all sizes spread what other users of a shared cache
    do over all of them.
    """
    b, size = torch.ones(16, 16), int(ADD_MIB * MIB / 8)
    sizes = _touched_mib()
    pairs = [(torch.ones(size), torch.ones(size)) for _ in range(round(sizes[-1] / ADD_MIB))]
    place = 0

    def lap_s(pairs_in_lap: int) -> list[float]:
        """Times of the adds of one lap over ``pairs_in_lap`` pairs."""
        times = []
        for x, y in pairs[place : place + pairs_in_lap]:
            torch.neg(b)  # another op between, as in a step
            start = time.perf_counter()
            torch.add(x, x, out=y)
            times.append(time.perf_counter() - start)
        return times

    def again_s(mib: float) -> float:
        """Median time of an add on data that were used in several laps before."""
        pairs_in_lap = round(mib / ADD_MIB)
        laps = [lap_s(pairs_in_lap) for _ in range(4 + round(COLD_LAPS_MIB / mib))]
        return statistics.median(itertools.chain(*laps[3:]))

    def second_s(mib: float) -> float:
        """Median time of an add on data that were used once before, and then were in memory."""
        nonlocal place
        pairs_in_lap, times = round(mib / ADD_MIB), list[float]()
        for _ in range(max(1, round(COLD_LAPS_MIB / mib))):
            place = place + pairs_in_lap if place + 2 * pairs_in_lap <= len(pairs) else 0
            lap_s(pairs_in_lap)
            times += lap_s(pairs_in_lap)
        return statistics.median(times)

    again_s(1.0)  # wakes the threads
    again = [[again_s(mib) for mib in sizes] for _ in range(COLD_ROUNDS)]
    second = [[second_s(mib) for mib in sizes] for _ in range(COLD_ROUNDS)]
    names = [f"{mib:g}" for mib in sizes]
    return (
        dict(zip(names, shares_of(again), strict=True)),
        dict(zip(names, shares_of(second), strict=True)),
    )


def shares_of(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Share of cold access, (t - t_warm) / (t_cold - t_warm), 0 to 1 and never falling.

    ``rounds`` of times t by size, from small to large: t is the median of a size's, t_warm the
    shorter one of the two smallest sizes, t_cold the median of the three largest.
    """
    measured = [statistics.median(times) for times in zip(*rounds, strict=True)]
    warm, cold = min(measured[:2]), statistics.median(measured[-3:])
    shares = [min(1.0, (t - warm) / max(cold - warm, 1e-9)) for t in measured]
    return [round(s, 3) for s in itertools.accumulate(shares, max)]


def measure_cpu() -> Gpu:
    """Measure this CPU: its peak by a 1024^3 product, bandwidth beyond its caches; takes 8 s."""
    a, beyond_caches_mib = torch.randn(1024, 1024), _touched_mib()[-1]
    peak = 2 * 1024**3 / _best_s(lambda: torch.mm(a, a), 10)
    bandwidth = beyond_caches_mib * MIB / _best_s(touched_others(beyond_caches_mib), 6)
    again, second = measure_cold_shares()
    return Gpu(
        name=cpu_name(),
        kind="cpu",
        vendor="cpu",
        architecture=platform.machine(),
        sm_count=cores(),
        peak_flops_per_s={"fp32": peak, "fp64": FP64_PEAK_FRAC * peak},
        hbm_bytes_per_s=bandwidth,
        hbm_bytes=memory_bytes(),
        l2_bytes=last_cache_bytes(),
        cold_share=again,
        cold_share_second=second,
    )


def gpu_of(properties: Any) -> Gpu:
    """The ``Gpu`` of a device, from ``torch.cuda.get_device_properties``.

    From its hardware file where there is one. Else peaks are assumed:
    fp32 = SMs * clock * 256 FLOP, other dtypes a multiple of it,
    bandwidth = 2 * memory clock * bus width in bytes.
    """
    known_gpu = gpu_named(properties.name)
    if known_gpu is not None:
        return load_gpu(known_gpu)
    clock_hz = properties.clock_rate * 1e3  # kHz
    fp32 = properties.multi_processor_count * FP32_FLOPS_PER_SM_AND_CLOCK * clock_hz
    transfers_per_s = MEMORY_TRANSFERS_PER_CLOCK * properties.memory_clock_rate * 1e3  # kHz
    return Gpu(
        name=slug(properties.name),
        sm_count=properties.multi_processor_count,
        peak_flops_per_s={"fp32": fp32} | {d: n * fp32 for d, n in PEAK_OVER_FP32.items()},
        hbm_bytes_per_s=transfers_per_s * properties.memory_bus_width / 8,
        hbm_bytes=float(properties.total_memory),
        l2_bytes=float(properties.L2_cache_size),
    )
