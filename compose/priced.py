"""Op calls to durations: family models where there are any, warm and cold mixed by reuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import pandas as pd

from microbench.hardware.spec import Gpu
from microbench.opcall import StepCapture
from microbench.ops import find_family

UNMODELLED = "unmodelled"


class Pricer(Protocol):
    """What prices rows of a family; ``learners.bundle.Bundle`` does."""

    @property
    def models(self) -> Mapping[str, Any]:
        """Families that have a model."""

    def price(
        self, family: str, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None
    ) -> pd.DataFrame:
        """predicted_us, predicted_us_p10, predicted_us_p90, in_envelope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOp:
    """One call with its duration; ``family`` is unmodelled where a roofline stood in."""

    op: str
    family: str
    phase: str
    duration_us: float
    low_us: float
    high_us: float
    flops: float
    in_envelope: bool


def cold_fractions(capture: StepCapture, cache_bytes: float) -> list[float]:
    """Per call, the byte-weighted share of its inputs that has left the cache.

    Reuse distance: bytes touched by all calls since the tensor's memory was last touched, in the
    steady state (the step before this one ran the same calls). A tensor is warm while the distance
    is below half the cache, cold above one and a half, linear between.
    """
    last: dict[int, float] = {}
    clock = 0.0
    result: list[float] = []
    for lap in range(2):
        for call in capture.calls:
            inputs = [t for t in call.tensors() if t.nbytes]
            if lap == 1:
                total = sum(t.nbytes for t in inputs)
                cold = 0.0
                for t in inputs:
                    distance = clock - last.get(t.storage, -1e30)
                    cold += t.nbytes * min(1.0, max(0.0, distance / cache_bytes - 0.5))
                result.append(cold / total if total else 0.0)
            for t in (*inputs, *call.outputs):
                clock += t.nbytes
            for t in (*inputs, *call.outputs):
                last[t.storage] = clock
    return result


def price_calls(capture: StepCapture, pricer: Pricer, gpu: Gpu, threads: int) -> list[PricedOp]:
    """Every call priced; shapes deduplicated, one pricer call per family."""
    found = [find_family(call) for call in capture.calls]
    prices: dict[str, dict[Any, tuple[pd.Series, pd.Series]]] = {}
    for name in {f.name for f, _ in found if f is not None and f.name in pricer.models}:
        points = list(dict.fromkeys(p for f, p in found if f is not None and f.name == name))
        rows = pd.DataFrame([asdict(p) for p in points]).assign(gpu=gpu.name, threads=threads)
        both = pd.concat([rows.assign(cache="warm"), rows.assign(cache="cold")], ignore_index=True)
        priced = pricer.price(name, both, {gpu.name: gpu}).to_dict("records")
        pairs = zip(priced[: len(points)], priced[len(points) :], strict=True)
        prices[name] = dict(zip(points, pairs, strict=True))  # type: ignore[arg-type]
    cold = cold_fractions(capture, gpu.l2_bytes)
    return list(_mixed(capture, found, prices, cold, gpu))


def _mixed(
    capture: StepCapture, found: Any, prices: Any, cold: list[float], gpu: Gpu
) -> Iterator[PricedOp]:
    for call, (family, params), share in zip(capture.calls, found, cold, strict=True):
        if family is None or family.name not in prices:
            moved = sum(t.nbytes for t in (*call.tensors(), *call.outputs))
            guess_us = moved / gpu.hbm_bytes_per_s * 1e6 + 2.0
            flops = float(family.flops(params)) if family else 0.0
            guess_us = max(guess_us, flops / gpu.peak("fp32") * 1e6)
            yield PricedOp(
                op=call.op,
                family=UNMODELLED,
                phase=call.phase,
                duration_us=guess_us,
                low_us=guess_us / 2,
                high_us=guess_us * 2,
                flops=flops,
                in_envelope=False,
            )
            continue
        warm, cool = prices[family.name][params]
        mix = {k: (1 - share) * warm[k] + share * cool[k] for k in warm if k != "in_envelope"}
        yield PricedOp(
            op=call.op,
            family=family.name,
            phase=call.phase,
            duration_us=mix["predicted_us"],
            low_us=mix["predicted_us_p10"],
            high_us=mix["predicted_us_p90"],
            flops=float(family.flops(params)),
            in_envelope=bool(warm["in_envelope"]),
        )
