"""Gpu: the peaks, sizes and rates of one device, read from YAML files or from plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from itercast.capture.base.assumptions import FILE, assumed
from itercast.capture.base.close_names import unknown
from itercast.capture.base.extensions import with_added
from itercast.capture.base.yaml_text import made_of, read_mapping

HERE = Path(__file__).parent
NAMES = "names.yaml"  # not of a GPU: how others write names
NEEDED = ("sm_count", "peak_flops_per_s", "hbm_bytes_per_s")  # in every file
UNITS = {  # of the keys of a file, with the least and the most; others are in another unit
    "hbm_bytes_per_s": ("bytes per second", 1e9, 1e15),
    "peak_flops_per_s": ("flops per second", 1e9, 1e18),
    "full_rate_flops_per_s": ("flops per second", 1e9, 1e18),
    "achieved_flops_per_s": ("flops per second", 1e9, 1e18),
    "hbm_bytes": ("bytes", 1e8, 1e14),
    "l2_bytes": ("bytes", 1e4, 1e12),
    "clock_hz": ("Hz", 1e8, 1e11),
    "link_bytes_per_s": ("bytes per second", 1e8, 1e14),
    "pcie_bytes_per_s": ("bytes per second", 1e8, 1e14),
    "power_w": ("W", 1.0, 1e5),
}
MOST_OVER_PEAK = 1.1  # no assumption: clocks above the rated one reach so much
BRIDGE = 2  # GPUs that an NVLink bridge joins
UNSTATED = assumed(__file__, "unstated")
COMPUTE_CAPABILITY = {  # by architecture: https://developer.nvidia.com/cuda-gpus
    "pascal": (6, 0),
    "volta": (7, 0),
    "turing": (7, 5),
    "ampere": (8, 0),
    "ada": (8, 9),
    "hopper": (9, 0),
    "blackwell": (10, 0),
    "blackwell-ultra": (10, 3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device: its peaks, memory, caches and links.

    - ``sm_count``: SMs, compute units or CPU cores.
    - ``peak_flops_per_s``: dense peak of matrix products by dtype, accumulated in fp32.
    - ``full_rate_flops_per_s``: rate of the same units without fp32 accumulation, where the vendor
      halves the rate for it (GeForce); kernels achieve a share of this rate, up to the peak.
    - ``achieved_flops_per_s``: measured rate of products of large square matrices, by dtype.
    - ``l2_bytes``: the last cache before memory.
    - ``link_bytes_per_s``: one direction of the fast link to other GPUs, 0 where there is none.
    - ``link_joins``: GPUs that the fast link joins; 2 for a bridge, 0 for all GPUs of a node.
    - ``cold_share``: (t - t_warm) / (t_cold - t_warm), 0 to 1, of a small op, by MiB that are
      touched between two uses of its data; empty where it was not measured.
    - ``cold_share_second``: the same of the second use of data that were in memory before; empty
      where it is as that of later uses.
    - ``contention``: while a message and compute overlap, both run at 1/contention of their speed;
      0 where it was not measured.
    """

    name: str
    kind: str = "gpu"
    vendor: str = "nvidia"
    architecture: str = ""
    sm_count: int = UNSTATED["sm_count"]
    clock_hz: float = UNSTATED["clock_hz"]
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    full_rate_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    achieved_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    hbm_bytes_per_s: float = UNSTATED["hbm_bytes_per_s"]
    hbm_bytes: float = UNSTATED["hbm_bytes"]
    l2_bytes: float = UNSTATED["l2_bytes"]
    power_w: float = 0.0
    link_bytes_per_s: float = 0.0
    link_joins: int = 0
    pcie_bytes_per_s: float = 0.0
    cold_share: Mapping[str, float] = field(default_factory=dict)
    cold_share_second: Mapping[str, float] = field(default_factory=dict)
    contention: float = 0.0

    def __hash__(self) -> int:
        return hash(self.name)

    def __post_init__(self) -> None:
        if not self.peak_flops_per_s or min(self.peak_flops_per_s.values()) <= 0:
            raise ValueError(f"{self.name}: peak_flops_per_s needs a positive number per dtype")
        if self.hbm_bytes_per_s <= 0 or self.sm_count < 1:
            raise ValueError(f"{self.name}: hbm_bytes_per_s and sm_count must be positive")

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s of a dtype; of fp32 where it is not stated, else the lowest peak."""
        for name in (dtype, "fp32"):
            if name in self.peak_flops_per_s:
                return self.peak_flops_per_s[name]
        return min(self.peak_flops_per_s.values())

    def full_rate(self, dtype: str) -> float:
        """The rate that kernels achieve a share of: the full rate if stated, else the peak."""
        return self.full_rate_flops_per_s.get(dtype) or self.peak(dtype)

    @property
    def usual_link(self) -> str:
        """The link among GPUs of a host without a node file; optional bridges do not count."""
        if self.kind == "cpu":
            return "host"
        return "nvlink" if self.link_bytes_per_s and self.link_joins != BRIDGE else "pcie"

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, as written to dataset cards and bundles."""
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in asdict(self).items()}


def load_gpu(name_or_path: str) -> Gpu:
    """Load a GPU by its name in microbench/hardware, or from a YAML file of the same form.

    ValueError where a file lacks what every forecast needs, or states a rate in another unit.
    """
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        if name_or_path not in (files := _gpu_files()):
            raise unknown("gpu", name_or_path, gpu_names())
        path = files[name_or_path]
    values = read_mapping(path, "hardware file")
    if missing := [key for key in NEEDED if key not in values]:
        raise ValueError(f"{path}: missing keys {missing}")
    gpu = made_of(Gpu, {"name": path.stem, **values}, str(path))
    _check_units(path, gpu)
    return gpu


def _check_units(path: Path, gpu: Gpu) -> None:
    """ValueError for a number that is in another unit, or that no GPU has."""
    for key, (unit, low, high) in UNITS.items():
        value = getattr(gpu, key)
        for number in value.values() if isinstance(value, Mapping) else (value,):
            unstated = number == 0 and key not in NEEDED
            if not (unstated or low <= number <= high):
                allowed = f"allowed are {low:g} to {high:g}"
                raise ValueError(f"{path}: {key} is in {unit}: {allowed}, got {number:g}")
    for dtype, rate in gpu.achieved_flops_per_s.items():
        if rate > MOST_OVER_PEAK * max(gpu.full_rate(dtype), gpu.peak(dtype)):
            peak = f"the peak of {dtype} is {gpu.peak(dtype):g}"
            raise ValueError(f"{path}: achieved_flops_per_s: {peak}, got {rate:g}")
    if 0 < gpu.contention < 1:
        raise ValueError(f"{path}: contention is 1 or more, or 0 (unknown), got {gpu.contention:g}")


def gpu_names() -> list[str]:
    """Names of the GPUs that ship with the project or that other packages add, and ``cpu``."""
    return ["cpu", *sorted(_gpu_files())]


@cache
def _gpu_files() -> dict[str, Path]:
    own = {p.stem: p for p in HERE.glob("*.yaml") if p.name not in (FILE, NAMES)}
    return with_added("gpus", own)


def slug(model_name: str) -> str:
    """A machine name safe for file names: lower case, words joined by dashes."""
    cleaned = re.sub(r"\((r|tm)\)|processor|cpu", " ", model_name.lower())
    return re.sub(r"[^a-z0-9.]+", "-", cleaned).strip("-") or "cpu"
