"""The machine at hand: its CPU as a Gpu value with measured peaks, and its name."""

from __future__ import annotations

import os
import platform
import re
import time
from pathlib import Path
from typing import Any

from microbench.hardware.spec import Gpu, slug


def cpu_name() -> str:
    """Slug of the CPU model and its core count, e.g. intel-xeon-2.50ghz-2c."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M)
        model = found.group(1) if found else model
    return f"{slug(model)}-{os.cpu_count() or 1}c"


def last_cache_bytes() -> float:
    """Size of the largest CPU cache in bytes; 8 MB where the system does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(float(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes, default=8e6)


def _best_s(run: Any, repetitions: int) -> float:
    best = float("inf")
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def measure_cpu() -> Gpu:
    """This CPU: peaks measured by a 1024^3 product and a 64 MB sum (about half a second)."""
    import torch  # lazy: names and cache sizes must be readable without torch

    a, x = torch.randn(1024, 1024), torch.randn(16 * 2**20)
    peak = 2 * 1024**3 / _best_s(lambda: torch.mm(a, a), 10)
    bandwidth = 3 * x.nbytes / _best_s(lambda: torch.add(x, x), 6)
    return Gpu(
        name=cpu_name(),
        kind="cpu",
        vendor="cpu",
        architecture=platform.machine(),
        sm_count=os.cpu_count() or 1,
        peak_flops_per_s={"fp32": peak, "fp64": peak / 2},
        hbm_bytes_per_s=bandwidth,
        hbm_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        l2_bytes=last_cache_bytes(),
    )
