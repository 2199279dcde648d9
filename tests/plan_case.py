"""Devices, a pricer and a search of plans that no bundle is needed for."""

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

import numpy as np
import pandas as pd

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.capture_model import capture
from itercast.compose.forecast import Forecast
from itercast.compose.plan_search.candidates import Search
from itercast.compose.plan_search.search import BranchAndBound, shapes_of
from itercast.compose.plan_search.sizes import CaptureAt
from itercast.compose.pricing.price_book import PriceBook
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import find_family

CPU = Gpu(name="toy", kind="cpu", sm_count=2, peak_flops_per_s={"fp32": 1e12}, l2_bytes=1e12)
GPU = Gpu(
    name="toy-gpu",
    contention=1.0,
    peak_flops_per_s={"fp32": 1e12},
    l2_bytes=1e12,
    hbm_bytes=16e9,
    link_bytes_per_s=1e11,
    pcie_bytes_per_s=1e10,
)


def forecast_of(**facts: Any) -> Forecast:
    """A forecast of these facts, all others 0 or empty."""
    zeros = dict.fromkeys(Forecast.__dataclass_fields__, 0.0)
    text = dict.fromkeys(("gpu", "plan", "bundle", "host", "stack", "network"), "")
    tables = ("by_family_us", "idle_by_us", "assumed_by_us", "memory_by_bytes", "lengths")
    tables += ("parts_frac",)
    return Forecast(**{**zeros, **text, **{name: {} for name in tables}, "notes": (), **facts})


def tensor(storage: int, *shape: int, dtype: str = "fp32") -> TensorSpec:
    return TensorSpec(shape=shape, dtype=dtype, storage=storage)


def call(op: str, inputs: list[Any], output: TensorSpec, phase: str = "forward") -> OpCall:
    return OpCall(op=f"aten.{op}", args=tuple(inputs), outputs=(output,), phase=phase)


def product_flops(calls: Iterable[OpCall]) -> int:
    """FLOPs of matrix products."""
    found = (find_family(c) for c in calls)
    return sum(int(f.flops(p)) for f, p in found if f is not None and f.name == "gemm")


class Fixed:
    """Everything takes 10 us, all of it certain."""

    models: Mapping[str, Any] = {}
    digest = ""

    def us(self, family: str, rows: pd.DataFrame) -> Any:
        """The time of each row, or of all."""
        return 10.0

    def price(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> pd.DataFrame:
        us = np.broadcast_to(self.us(family, rows), len(rows)).astype(float)
        columns = {"predicted_us": us, "predicted_us_p10": us, "predicted_us_p90": us}
        return pd.DataFrame({**columns, "in_envelope": True}, index=rows.index)

    def inside(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> list[bool]:
        return [True] * len(rows)


class Flat(Fixed):
    """An elementwise op takes 1 us, a host event none, a collective 1 us per KiB."""

    models: Mapping[str, Any] = dict.fromkeys(
        ("gemm", "attention", "norm", "reduction", "embedding", "index", "optimizer", "host")
    ) | {"elementwise": None, "collective": None}

    def us(self, family: str, rows: pd.DataFrame) -> Any:
        if family == "collective":
            return rows["message_bytes"] / 1024
        return {"elementwise": 1.0, "host": 0.0}.get(family, 10.0)


def capture_at(batch: int, seq: int, autocast: bool = False) -> StepCapture:
    """One step of a small GPT."""
    return capture("gpt-s", batch=batch, seq=seq, amp=autocast, dtype="bf16" if autocast else None)


def experts_at(batch: int, seq: int, autocast: bool = False) -> StepCapture:
    """One step of a small mixture of four experts."""
    return capture("moe-s", batch=batch, seq=seq, amp=autocast, dtype="bf16" if autocast else None)


def search_of(gpu: Gpu = GPU, capture_at: CaptureAt = capture_at) -> Search:
    """Plans of the small GPT, or another model, at eight samples a step."""
    book = PriceBook(Flat(), gpu, 0)
    return Search(capture_at=capture_at, book=book, node=None, batch=8, seq=64, optimizer="adamw")


def legal_plans(search: Search, gpus: int, objective: str) -> BranchAndBound:
    """All legal plans without their variants, none of them simulated."""
    found, shapes = BranchAndBound(search, objective), shapes_of(search, gpus, objective)
    while shapes.waiting:
        found.add(shapes.take(inf))
    found.near(shapes, lambda plan: True)
    return found
