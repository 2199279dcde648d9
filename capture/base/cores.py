"""The CPU cores that this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: fewer in a container or under taskset
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
