"""Rows of a dataset: the columns that every measurement has, and those of one that failed."""

from __future__ import annotations

import functools
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from itercast.capture.base.slow_imports import torch
from itercast.microbench.store import Facts, Row
from itercast.microbench.timing.nvml import Nvml

OUT_OF_MEMORY = ("out of memory", "can't allocate", "alloc_failed")
UNSUPPORTED = (
    "not implemented",
    "not supported",
    "only supported",
    "status_not_supported",  # cuBLAS and cuDNN
    "could not create a primitive",  # oneDNN
    "unable to find an engine",
    "no available kernel",  # of attention
)
REASON_LETTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Where and how a worker measures: GPU or CPU, threads, and the run that it is part of."""

    root: str
    run_id: str  # of its journal
    device: str  # cpu or cuda
    gpu: str  # name of a GPU's hardware file, or of the CPU
    threads: int  # CPU threads of torch; 0 on a GPU
    ranks: int
    begin_s: float = 0.0  # time.monotonic() when the budget begins; 0: when the worker is ready
    lane: int = 0  # number among the ``lanes`` that share what is measured, a GPU each
    lanes: int = 1

    @property
    def journal(self) -> Path:
        """The file of the rows that its worker has measured."""
        return Path(self.root) / ".journal" / f"{self.run_id}.jsonl"

    @property
    def printed(self) -> Path:
        """The file of what its worker prints, on a GPU."""
        return Path(self.root) / "logs" / f"{self.run_id}.log"

    def rows(self) -> int:
        """How many rows its worker has measured so far."""
        return self.journal.read_bytes().count(b"\n") if self.journal.is_file() else 0


def new_run_id(label: str) -> str:
    """A name that no other run has, made of its time, process and ``label``."""
    now = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06d}"
    return f"{now}-{os.getpid()}-{label}"


@functools.cache
def machine(device: str) -> Row:
    """Columns ``host``, and of a GPU ``gpu_uuid`` and ``gpu_index``, its number on the host."""
    if device != "cuda" or not torch.cuda.is_available():
        return {"host": socket.gethostname()}
    uuid = str(torch.cuda.get_device_properties(0).uuid)  # the rank that writes rows has GPU 0
    index = Nvml(uuid).index()
    if index is None:  # without NVML: by what this process may see
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        index = int(visible[0]) if visible[0].isdigit() else 0
    return {"host": socket.gethostname(), "gpu_uuid": uuid, "gpu_index": index}


def make_row(
    order: Order, *, family: str, params: Facts, repeat: int, key: str, timer: str, measured: Facts
) -> Row:
    """One row: the parameters of a point, how it was measured, and what was measured.

    ``timer``: "device" for GPU time, "with_launch" for host time until the work is done.
    ``measured`` has ``status``, times and further columns; its values win.
    """
    return {
        "op": family,
        **params,
        "family": family,
        "gpu": order.gpu,
        **machine(order.device),
        "stack": f"torch-{torch.__version__}",
        "timer": timer,
        "threads": order.threads,
        "repeat": repeat,
        "run_id": order.run_id,
        "key": key,
        "reason": "",
        **measured,
    }


def failure(exc: Exception) -> Row:
    """Columns ``status`` and ``reason`` of a measurement that raised this exception."""
    return {"status": failure_status(exc), "reason": one_line(exc)}


def failure_status(exc: Exception) -> str:
    """The status of a failed measurement: oom (out of memory), unsupported or error."""
    text = str(exc).lower()
    if isinstance(exc, MemoryError) or any(words in text for words in OUT_OF_MEMORY):
        return "oom"
    if isinstance(exc, NotImplementedError) or any(words in text for words in UNSUPPORTED):
        return "unsupported"
    return "error"


def one_line(exc: Exception) -> str:
    """The beginning of an exception's text, on one line."""
    return " ".join(str(exc).split())[:REASON_LETTERS]
