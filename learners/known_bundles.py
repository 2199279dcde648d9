"""Finds the bundle and the description of a device by the names a user gives."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from itercast.learners.bundle import SHIPPED, SHIPPED_CPU, Bundle
from itercast.microbench.hardware.machine import cpu_name
from itercast.microbench.hardware.spec import Gpu, gpu_names, load_gpu

logger = logging.getLogger(__name__)
LOCAL = (Path("runs/demo/bundle"), Path("bundles/local"))


def find_bundle(gpu: str, path: Path | None = None) -> tuple[Path, Bundle]:
    """The bundle at ``path``; else the newest local one with rows of this GPU, else a shipped."""
    if path is not None:
        return path, _load(path)
    name = cpu_name() if gpu == "cpu" else gpu
    for folder in local_bundles():
        bundle = _load_local(folder)
        if bundle is not None and name in bundle.gpus:
            return folder, bundle
    of_cpu = gpu == "cpu" or (gpu not in gpu_names() and gpu in _load(SHIPPED_CPU).gpus)
    shipped = SHIPPED_CPU if of_cpu else SHIPPED
    return shipped, _load(shipped)


def local_bundles() -> list[Path]:
    """Folders of bundles that ``demo`` and ``train`` wrote here, the newest first."""
    written = {p: _changed_ns(p) for p in LOCAL}
    return sorted(filter(written.get, LOCAL), key=lambda p: -written[p])


def _load_local(folder: Path) -> Bundle | None:
    """The bundle in a folder; None, with a warning, where it is of another format version."""
    try:
        return _load(folder)
    except ValueError as exc:
        logger.warning("local bundle ignored: %s", exc)
        return None


def _load(folder: Path) -> Bundle:
    """The bundle in a folder, read once until its ``bundle.json`` changes."""
    return _load_at(folder, _changed_ns(folder))


def _changed_ns(folder: Path) -> int:
    """When the ``bundle.json`` of a folder was written; 0 without one."""
    facts = folder / "bundle.json"
    return facts.stat().st_mtime_ns if facts.is_file() else 0


@lru_cache(maxsize=8)
def _load_at(folder: Path, changed_ns: int) -> Bundle:
    return Bundle.load(folder)


def find_gpu(name: str, bundle: Bundle) -> Gpu:
    """The GPU by name or file; ``cpu`` is this machine's CPU, or else one of the bundle.

    Peaks of dtypes that a bundle does not know come from the file of this name that ships.
    """
    if name in bundle.gpus:
        gpu = bundle.gpus[name]
        shipped = _shipped_gpu(name).peak_flops_per_s if name in gpu_names() else {}
        lacks_peaks = bool(shipped.keys() - gpu.peak_flops_per_s.keys())
        peaks = {**shipped, **gpu.peak_flops_per_s}
        return replace(gpu, peak_flops_per_s=peaks) if lacks_peaks else gpu
    if name != "cpu":
        return _shipped_gpu(name) if name in gpu_names() else load_gpu(name)
    cpus = {n: g for n, g in bundle.gpus.items() if g.kind == "cpu"}
    if not cpus:
        raise ValueError(f"gpu 'cpu': the bundle has no CPU; it has {sorted(bundle.gpus)}")
    return cpus.get(cpu_name(), next(iter(cpus.values())))


@lru_cache(maxsize=64)
def _shipped_gpu(name: str) -> Gpu:
    return load_gpu(name)
