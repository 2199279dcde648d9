"""Made-up results of one device that are small enough to check a report by hand."""

from typing import Any

import numpy as np
import pandas as pd

from itercast.eval.results import CaseResult
from itercast.extras.pages.blocks import Device

SCORES = {"mape_pct": 5.0, "median_ape_pct": 4.0, "p90_ape_pct": 9.0, "bias_pct": 0.5}


def case(name: str, predicted_us: float, measured_us: float, **parts_us: float) -> CaseResult:
    """A measured iteration; all of it kernels unless parts are given."""
    plan = "dp=2" if name.startswith("plan") else ""
    return CaseResult(
        case=name,
        plan=plan,
        model=name,
        ranks=1,
        samples=1,
        predicted_us=predicted_us,
        predicted_us_p10=predicted_us * 0.9,
        predicted_us_p90=predicted_us * 1.1,
        measured_us=measured_us,
        rounds_us=(measured_us,),
        retest_ape_pct=2.0,
        by_family_us={"gemm": predicted_us},
        unmodelled_frac=0.0,
        gpu="toy",
        parts_us=parts_us or {"kernels": predicted_us},
    )


def op(predicted_us: float, measured_us: float, **more: Any) -> dict[str, Any]:
    """A held-out row of a product of 1 KiB that nothing is wrong with."""
    row = {"family": "gemm", "op": "mm", "gpu": "toy", "dtype": "fp32", "params": "m=8"}
    row |= {"bytes_moved": 1024.0, "roofline_us": 1.0, "outside": "", "neighbour_log2": 0.5}
    row |= {"measured_us": measured_us, "predicted_us": predicted_us, "retest_pct": np.nan}
    row |= {"predicted_us_p10": predicted_us / 1.25, "predicted_us_p90": predicted_us * 1.25}
    return {**row, "spread_pct": 1.0, "threads": 2, "cache": "warm", **more}


RESULTS = [case("a", 1100, 1000), case("b<i>", 900, 1000), case("plan-c", 1600, 2000)]
OPS = pd.DataFrame(
    [
        op(11, 10, params="m=1"),  # +10 %
        op(9, 10, params="m=2", retest_pct=5.0),  # -10 %
        op(12, 10, params="m=3"),  # +20 %
        op(30, 10, params="m=4", outside="log_m", cache="cold"),  # +200 %
        op(5, 10, family="norm", op="layer", bytes_moved=2.0**21, dtype="bf16"),  # -50 %
        op(5, 10, family="host", op="call", bytes_moved=0.0),
    ]
)
LEARNERS = dict.fromkeys(("blend", "nearest", "roofline"), SCORES)
FIT = {
    "gemm": {"rows": 100, "retest_ape_pct": 3.0, "coverage_pct": 81.0, "learners": LEARNERS},
    "norm": {"rows": 50, "retest_ape_pct": None, "coverage_pct": 70.0, "learners": LEARNERS},
}
DEVICE = Device(name="toy", results=RESULTS, ops=OPS, fit=FIT)
