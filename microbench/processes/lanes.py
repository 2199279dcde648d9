"""Lanes: several workers side by side, one per GPU of this node, each watched by a thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from itercast.capture.base.slow_imports import torch
from itercast.microbench.processes.watch import POLL_S

R = TypeVar("R")
T = TypeVar("T")
Tell = Callable[[T], None]


def visible_gpus() -> list[str]:
    """Names of this node's GPUs for CUDA_VISIBLE_DEVICES: those listed there, else 0, 1, ..."""
    count = torch.cuda.device_count()
    listed = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
    return listed[:count] or [str(n) for n in range(count)]


def gpu_count(text: str, device: str) -> int:
    """How many of this node's GPUs to use: ``all`` or a number; ValueError for others."""
    if text == "1":
        return 1
    if device != "cuda":
        raise ValueError(f"devices {text!r}: only GPUs are measured side by side; allowed: 1")
    present = len(visible_gpus())
    count = present if text == "all" else int(text) if text.isdigit() else 0
    if not 1 <= count <= present:
        raise ValueError(f"devices {text!r}: allowed are all and 1 to {present}, the GPUs here")
    return count


class LaneStopped(Exception):
    """Raised in a lane whose program was interrupted, so that its worker is killed."""


def run_lanes(
    count: int, run: Callable[[int, Tell[T]], R], show: Callable[[list[T]], None]
) -> list[R]:
    """Call ``run(lane, tell)`` for all lanes at once; returns what they returned.

    A lane tells its progress by ``tell`` a few times a second; ``show`` gets the latest of each
    lane, always in this thread. When this thread is interrupted all lanes end.
    """
    if count == 1:
        return [run(0, lambda value: show([value]))]
    latest: dict[int, T] = {}
    stopped = False

    def teller(lane: int) -> Tell[T]:
        def tell(value: T) -> None:
            if stopped:
                raise LaneStopped
            latest[lane] = value

        return tell

    with ThreadPoolExecutor(count) as pool:
        lanes = [pool.submit(run, lane, teller(lane)) for lane in range(count)]
        try:
            while not all(lane.done() for lane in lanes):
                time.sleep(POLL_S)
                show(list(latest.values()))
        except BaseException:
            stopped = True
            raise
    return [lane.result() for lane in lanes]
