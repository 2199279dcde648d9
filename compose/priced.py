"""Op calls to durations: family models where there are any, warm and cold mixed by reuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import pandas as pd

from compose.reuse import cold_fractions
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
    cold = cold_fractions(capture, gpu)
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
