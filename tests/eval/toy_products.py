"""Products measured on a made-up device, as a dataset and as a bundle that is trained on them."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.matrix import gemm
from itercast.microbench.store import write_card, write_part

TOY = Gpu(name="toy", sm_count=8, peak_flops_per_s={"fp32": 1e13}, hbm_bytes_per_s=1e12)


def products(count: int, noise: float = 0.02) -> pd.DataFrame:
    """Products on a device of 8 cores: three times the roofline, more for few rows."""
    rng, found = np.random.default_rng(0), []
    for p in islice(gemm.sweep(), count):
        roof_us = max(gemm.flops(p) / 1e13, gemm.bytes_moved(p) / 1e12) * 1e6 + 2
        facts = {"family": "gemm", "gpu": "toy", "threads": 0, "cache": "warm", "status": "ok"}
        law = 3 * roof_us * (1 + 8 / p.m**0.5) * rng.lognormal(0, noise)
        found.append({**asdict(p), **facts, "time_us": law})
    return pd.DataFrame(found)


def write_products(root: Path, count: int, noise: float = 0.02) -> Path:
    """The products as a dataset with a card of the device; returns its root."""
    path = write_part(root, "gemm", "toy", products(count, noise), "0")
    write_card(path.parent, {"hardware": TOY.to_dict()})
    return root
