"""Fast Fourier transform of real numbers along the last dimension."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from itercast.capture.base.slow_imports import torch  # when it is used: formulas do without
from itercast.capture.opcall import OpCall, torch_dtype
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Family, GpuSweep, Workload, itemsize_bytes, log_uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class Fft:
    """One call of torch.fft.rfft on a tensor of ``rows`` times ``size`` real numbers."""

    rows: int
    size: int
    op: str = "r2c"
    dtype: str = "fp32"


def sweep() -> Iterator[Fft]:
    """Endless: 1 to 4096 rows of 16 to 65536 numbers, every other size a power of two."""
    rng = np.random.default_rng(0)
    while True:
        rows, size = log_uniform(rng, 1, 4096), log_uniform(rng, 16, 65536)
        if rng.random() < 0.5:
            size = 2 ** round(np.log2(size))
        if rows * size < 2**24:
            yield Fft(rows=rows, size=size)


def resize(p: Fft, factor: float, first_share: float) -> Fft:
    """``factor`` times the rows: on a GPU small points of the sweep get more of them."""
    return replace(p, rows=max(1, round(p.rows * factor)))


def build(p: Fft, device: str) -> Workload:
    """Allocate the input; ``run`` only launches."""
    x = torch.randn(p.rows, p.size, device=device).to(torch_dtype(p.dtype))
    return Workload(run=lambda: torch.fft.rfft(x), through_aten=False)


def flops(p: Any) -> Any:
    """2.5 * size * log2(size) per row, as http://www.fftw.org/speed/method.html counts it."""
    return 2.5 * p.rows * p.size * np.log2(p.size)  # no assumption: a definition


def bytes_moved(p: Any) -> Any:
    """Lower bound: real input read once, size / 2 + 1 complex numbers written once."""
    return 1.0 * p.rows * itemsize_bytes(p.dtype) * (p.size + 2 * (p.size // 2 + 1))


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
    """Sizes, whether the size is a power of two, and the share of the last cache."""
    log_size = np.log2(p.size)
    return {
        "dtype": p.dtype,
        "log_rows": np.log2(p.rows),
        "log_size": log_size,
        "power_of_two": 1.0 * (log_size == np.round(log_size)),
        "log_fill": np.log2(bytes_moved(p) / gpu.l2_bytes),
    }


def from_call(call: OpCall) -> Fft | None:
    """_fft_r2c(x, dim, normalization, onesided) along the last dimension; None otherwise."""
    x, dims = call.args[0], call.args[1]
    if tuple(dims) not in ((-1,), (len(x.shape) - 1,)):
        return None
    return Fft(rows=x.numel // x.shape[-1], size=x.shape[-1], dtype=x.dtype)


FAMILY = Family(
    name="fft",
    params=Fft,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={"aten._fft_r2c.default": from_call},
    gpu_sweep=GpuSweep(dtypes={"fp32": 1.0}, resize=resize),  # torch has no rfft in 16 bits
)
