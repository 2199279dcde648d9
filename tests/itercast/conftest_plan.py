"""A GPU and a search that no bundle is needed for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from compose.priced import PriceBook
from compose.search import Search
from itercast.api import capture_case
from microbench.cases.registry import case
from microbench.hardware.spec import Gpu
from microbench.opcall import StepCapture

GPU = Gpu(
    name="toy",
    peak_flops_per_s={"fp32": 1e12},
    hbm_bytes=1e9,
    link_bytes_per_s=1e11,
    pcie_bytes_per_s=1e10,
)


class Roofline:
    """Knows no family."""

    models: Mapping[str, Any] = {}

    def price(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> pd.DataFrame:
        raise ValueError(f"no model of {family}")


def capture_at(batch: int, seq: int) -> StepCapture:
    return capture_case(case("gpt-s"), batch=batch, seq=seq)


def search_of() -> Search:
    """Plans of a small GPT at eight samples a step."""
    book = PriceBook(Roofline(), GPU, 0)
    return Search(capture_at=capture_at, book=book, node=None, batch=8, seq=64, optimizer="adamw")
