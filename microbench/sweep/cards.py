"""Facts for the cards of a sweep: machine, software versions, date, commit."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from itercast.capture.base.slow_imports import torch
from itercast.microbench import store
from itercast.microbench.hardware.machine import cpu_name, gpu_of, measure_cpu
from itercast.microbench.processes.virtual_cores import VirtualCores
from itercast.microbench.store import Row
from itercast.microbench.timing.nvml import driver_version

COMMIT = "ITERCAST_COMMIT"  # environment variable with the commit, where git is missing


def card_facts(root: Path, device: str) -> Row:
    """Facts for every card of this sweep: machine, versions, date."""
    hardware = store.read_hardware([root])
    gpu = hardware.get(cpu_name()) if device == "cpu" else cuda_gpu()
    if gpu is None:
        VirtualCores().settle()
        gpu = measure_cpu()
    return {
        "what": "single-op times swept by itercast collect",
        "when": datetime.date.today().isoformat(),
        "licence": "Apache-2.0",
        "versions": {"python": sys.version.split()[0], "torch": str(torch.__version__)}
        | (cuda_versions() if device == "cuda" else {}),
        "hardware": hardware.get(gpu.name, gpu).to_dict(),
    }


def cuda_versions() -> dict[str, str]:
    """Versions of CUDA, cuDNN, NCCL and driver, the GPU's UUID and the commit, where known."""
    versions = {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "gpu_uuid": torch.cuda.get_device_properties(0).uuid,
        "driver": driver_version(),
        "commit": commit(),
    }
    return {name: str(value) for name, value in versions.items() if value}


def commit() -> str:
    """The commit of these sources, from git or else from the environment."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        head = ""
    return head or os.environ.get(COMMIT, "")


def cuda_gpu() -> Any:
    """The first CUDA device as a ``Gpu``: from its hardware file, else from torch's properties."""
    if not torch.cuda.is_available():
        raise ValueError("device 'cuda' is not available here; allowed: cpu")
    return gpu_of(torch.cuda.get_device_properties(0))
