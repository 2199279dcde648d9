"""The CPU cores that this process may use, and their model."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: fewer in a container or under taskset
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """The CPU's model with family and number, as Linux tells them: clouds leave out the latter."""
    numbers = [f"{n} {cpu_fact(x)}" for n, x in (("family", "cpu family"), ("model", "model"))]
    return ", ".join([cpu_fact("model name") or platform.machine(), *numbers])


def cpu_fact(name: str) -> str:
    """What Linux says of the first core under a name, empty where it says nothing."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    found = re.search(rf"^{name}\s*:\s*(.+)$", text, re.M)
    return found.group(1) if found else ""
