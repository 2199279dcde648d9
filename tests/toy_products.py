"""Products measured on a made-up device, as a dataset and as a bundle that is trained on them."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.matrix import gemm
from itercast.microbench.store import write_card, write_part

TOY = Gpu(name="toy", sm_count=8, peak_flops_per_s={"fp32": 1e13}, hbm_bytes_per_s=1e12)


def roofline_us(p: gemm.Gemm, gpu: Gpu = TOY) -> float:
    """The least time of a product, and a launch of 2 us."""
    least_s = max(gemm.flops(p) / gpu.peak("fp32"), gemm.bytes_moved(p) / gpu.hbm_bytes_per_s)
    return 1e6 * least_s + 2


def timed(
    points: Iterable[gemm.Gemm], law: Callable[[gemm.Gemm], float], gpu: Gpu = TOY, **facts: Any
) -> pd.DataFrame:
    """Rows of products that take ``law`` times their roofline."""
    common = {"family": "gemm", "gpu": gpu.name, "threads": 0, "cache": "warm", "status": "ok"}
    rows = [{**asdict(p), **common, "time_us": law(p) * roofline_us(p, gpu)} for p in points]
    return pd.DataFrame(rows).assign(**facts)


def products(count: int, noise: float = 0.02) -> pd.DataFrame:
    """Products on a device of 8 cores: three times the roofline, more for few rows."""
    rng = np.random.default_rng(0)
    law = lambda p: 3 * (1 + 8 / p.m**0.5) * rng.lognormal(0, noise)  # noqa: E731
    return timed(islice(gemm.FAMILY.sweep(), count), law)


def write_rows(root: Path, rows: pd.DataFrame, gpu: Gpu = TOY, part: str = "0") -> Path:
    """The rows as a part of a dataset with a card of the device; returns its root."""
    path = write_part(root, "gemm", gpu.name, rows, part)
    write_card(path.parent, {"hardware": gpu.to_dict()})
    return root


def write_products(root: Path, count: int, noise: float = 0.02) -> Path:
    """The products as a dataset."""
    return write_rows(root, products(count, noise))
