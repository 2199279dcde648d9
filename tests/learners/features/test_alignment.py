"""Rows of products that are aligned and of others do not disturb each other."""

import numpy as np
import pytest
from toy_products import TOY, timed

from itercast.learners.family_model import FamilyModel, learn_quickly, prepare
from itercast.learners.models.trees import default_options
from itercast.microbench.ops import families
from itercast.microbench.ops.matrix.gemm import Gemm, features

GEMM, GPUS = families()["gemm"], {TOY.name: TOY}
SLOWER = {16: 1.0, 8: 2.0, 4: 4.0}  # by the bytes to which all rows are aligned


def products(count: int, seed: int, *, odd: bool) -> list[Gemm]:
    """Products whose sides are multiples of 8; of odd ones one side is not."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        sides = [8 * int(2 ** rng.uniform(2, 8)) for _ in "mnk"]
        if odd:
            sides[int(rng.integers(3))] += int(rng.integers(1, 8))
        m, n, k = sides
        found.append(Gemm(m=m, n=n, k=k, layout=str(rng.choice(["nn", "nt", "tn"]))))
    return found


def law(p: Gemm) -> float:
    """Times the roofline: kernels read up to 16 bytes at once, as far as all rows are aligned."""
    rows = (p.m if p.layout == "tn" else p.k, p.k if p.layout == "nt" else p.n, p.n)
    return 3 * (1 + 8 / p.m**0.5) * SLOWER[min(min(4 * n & -4 * n, 16) for n in rows)]


def learned(points: list[Gemm]) -> FamilyModel:
    rows = timed(points, law)
    prepared = prepare(rows, GEMM, GPUS)
    return learn_quickly(prepared, np.arange(len(rows)), default_options(prepared.table))


def test_forecasts_of_aligned_sizes_do_not_move_when_odd_rows_are_added() -> None:
    """Without the alignment among the features they move by a third in the median."""
    aligned, odd = products(300, 0, odd=False), products(300, 1, odd=True)
    asked = timed(products(100, 2, odd=False), law)
    alone, both = (learned(p).predict(asked, GEMM, GPUS) for p in (aligned, aligned + odd))
    moved = np.abs(np.log(both.time_us / alone.time_us))
    assert np.median(moved) < 0.01
    assert np.quantile(moved, 0.9) < 0.05


@pytest.mark.parametrize(
    ("layout", "dtype", "found"),
    [
        ("nn", "bf16", (5, 4, 4)),  # rows of A have k = 48: 96 bytes; those of B and C n = 24: 48
        ("nt", "bf16", (5, 5, 4)),
        ("tn", "fp32", (2, 5, 5)),  # rows of A have m = 33: 132 bytes
        ("nn", "fp8", (4, 3, 3)),
    ],
)
def test_alignment_is_that_of_rows_in_memory(
    layout: str, dtype: str, found: tuple[int, int, int]
) -> None:
    """log2 of the largest power of two that divides the bytes of a row."""
    made = features(Gemm(m=33, n=24, k=48, layout=layout, dtype=dtype), TOY)
    assert tuple(made[f"log_{name}_aligned"] for name in "abc") == found
    assert made["log_least_aligned"] == min(found)
