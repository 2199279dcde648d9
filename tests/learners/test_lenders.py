"""Known GPUs price those never seen: the nearer lend more."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from learners.lenders import Asked, Lenders, what_was_measured
from learners.table import Encoder, feature_table, identities
from microbench.hardware.spec import Gpu
from microbench.ops import gemm, norm
from microbench.ops.family import Family


def gpu(name: str, bandwidth: float = 1e12, peak: float = 1e13, architecture: str = "") -> Gpu:
    peaks = {"fp32": peak}
    return Gpu(
        name=name, architecture=architecture, hbm_bytes_per_s=bandwidth, peak_flops_per_s=peaks
    )


def asked(*rows: tuple[str, str, str]) -> Asked:
    """Rows of a GPU, in a dtype, under a stack."""
    columns = (np.array(values, dtype=object) for values in zip(*rows, strict=True))
    whose = dict(zip(("gpu", "dtype", "stack"), columns, strict=True))
    frame = pd.DataFrame(whose)
    return Asked(**whose, gpus={}, rows=frame, family=gemm.FAMILY, launch={})


def lenders(*rows: tuple[str, str, str]) -> Lenders:
    """GPUs that were measured so."""
    return Lenders(encoder=Encoder([], {}), measured=what_was_measured(asked(*rows)))


GPUS = {"new": gpu("new"), "twin": gpu("twin"), "slow": gpu("slow", bandwidth=5e11)}


def test_an_octave_of_bandwidth_or_peak_is_a_quarter_as_another_architecture_is() -> None:
    found = lenders(("twin", "fp32", "a"), ("slow", "fp32", "a"))
    shares = found.shares("new", "fp32", "a", GPUS)
    assert shares == {("twin", "a"): pytest.approx(0.8), ("slow", "a"): pytest.approx(0.2)}
    doubled = GPUS | {"slow": gpu("slow", peak=2e13)}
    assert found.shares("new", "fp32", "a", doubled) == shares
    other = GPUS | {"slow": gpu("slow", architecture="other")}
    assert found.shares("new", "fp32", "a", other) == shares


def test_other_software_counts_for_three_octaves() -> None:
    found = lenders(("twin", "fp32", "b"), ("slow", "fp32", "a"))  # 3 octaves off, and 1
    shares = found.shares("new", "fp32", "a", GPUS)
    assert shares == {("twin", "b"): pytest.approx(1 / 17), ("slow", "a"): pytest.approx(16 / 17)}
    shares = found.shares("new", "fp32", "", GPUS)  # no software stated: none is other
    assert shares["twin", "b"] == pytest.approx(0.8)


def test_other_dtypes_are_lent_only_where_nobody_has_the_right_one() -> None:
    """Not even a GPU's own: its half precision ran on other units."""
    found = lenders(("twin", "fp16", "a"), ("slow", "fp32", "b"), ("new", "fp16", "a"))
    assert found.shares("new", "fp32", "a", GPUS) == {("slow", "b"): 1.0}
    assert found.shares("new", "fp8", "a", GPUS).keys() == {("new", "a"), ("twin", "a")}


def test_far_lenders_are_not_asked() -> None:
    """Three octaves are 1/64 of a twin; of four twins three are enough."""
    gpus = GPUS | {"far": gpu("far", bandwidth=8e12)}
    found = lenders(("twin", "fp32", "a"), ("far", "fp32", "a"))
    assert found.shares("new", "fp32", "a", gpus) == {("twin", "a"): 1.0}
    twins = [f"twin{i}" for i in range(4)]
    found = lenders(*((name, "fp32", "a") for name in twins))
    shares = found.shares("new", "fp32", "a", GPUS | {name: gpu(name) for name in twins})
    assert list(shares.values()) == pytest.approx([1 / 3] * 3)


def test_strange_is_a_gpu_or_its_dtype_that_only_others_were_measured_in() -> None:
    found = lenders(("one", "fp32", "a"), ("two", "fp16", "a"))
    rows = (("one", "fp32"), ("one", "fp16"), ("one", "fp8"), ("new", "fp32"))
    assert found.strange(asked(*((*row, "a") for row in rows))).tolist() == [0, 1, 0, 1]


def test_the_usual_stack_of_a_gpu_is_lent_first() -> None:
    rows = [("twin", "fp32", "b"), ("twin", "fp32", "a"), ("twin", "fp32", "b")]
    assert what_was_measured(asked(*rows)) == {"twin": {"fp32": ["b", "a"]}}
    assert list(lenders(*rows).shares("new", "fp32", "", GPUS)) == [("twin", "b")]
    assert list(lenders(*rows).shares("new", "fp32", "a", GPUS)) == [("twin", "a")]


class Echo:
    """A learner whose log ratio is its first input."""

    def predict(self, x: np.ndarray, roofline_us: np.ndarray) -> np.ndarray:
        return np.asarray(roofline_us * np.exp(x[:, 0]))


@pytest.mark.parametrize("family", [gemm.FAMILY, norm.FAMILY])
def test_what_does_not_go_by_tiles_is_described_on_the_gpu_that_lends(family: Family) -> None:
    """32 MiB read and written fill a cache of 64 MiB, and four times one of 16 MiB."""
    gpus = {
        "new": replace(gpu("new"), l2_bytes=2**26),
        "twin": replace(gpu("twin"), l2_bytes=2**24),
    }
    p = (
        family.params(m=2048, n=2048, k=2048)
        if family.tiled
        else norm.Norm(op="layer", rows=8192, cols=1024)
    )
    rows = pd.DataFrame([{**asdict(p), "gpu": "new"}])
    features, roofline_us = feature_table(rows, family, gpus)
    features |= identities(rows, family, {})
    found = Asked.of(rows, features, gpus, family, {})
    told = Lenders(
        encoder=Encoder(["log_cache_fill", "gpu"], {"gpu": ["twin"]}),
        measured={"twin": {"fp32": ["a"]}},
    )
    x = told.encoder.encode(features)
    learner: Any = Echo()
    ratio = told.predict(learner, x, roofline_us, found) / roofline_us
    own_fill = float(features["log_cache_fill"][0])
    assert np.log(ratio[0]) == pytest.approx(own_fill if family.tiled else own_fill + 2, rel=1e-5)
