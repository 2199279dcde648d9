"""One model of several GPUs: what is known stays exact, what is new is sane, a few rows help."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from toy_products import timed, write_rows

from itercast.capture.base.switches import switching_off
from itercast.extras.calibration.few_rows import calibrate_bundle
from itercast.learners.bundle import Bundle
from itercast.learners.features.table import launch_us, learn_launch_us
from itercast.learners.train import train
from itercast.learners.transfer.calibration import (
    DURATION,
    KIND,
    NOISE,
    SHIFT,
    SIZES,
    Calibration,
    covariance,
    points,
)
from itercast.microbench.hardware.host import load_host
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.matrix import gemm
from itercast.microbench.ops.step import host

LAW = {"one": 1.5, "two": 2.0, "three": 2.5, "new": 4.0}


def toy(name: str) -> Gpu:
    speed = 1 + len(name) % 3
    peaks = {"fp32": 1e13 * speed}
    return Gpu(name=name, sm_count=8, peak_flops_per_s=peaks, hbm_bytes_per_s=1e12 * speed)


def in_fp32() -> Iterator[gemm.Gemm]:
    """The products that a CPU is swept for, but those in bf16."""
    return (p for p in gemm.FAMILY.sweep() if p.dtype == "fp32")


def measured(name: str, count: int, skip: int = 0) -> pd.DataFrame:
    """Rows of a GPU whose products take LAW times the roofline, with 2 % noise."""
    rng, points = np.random.default_rng(len(name) + skip), islice(in_fp32(), skip, skip + count)
    law = lambda p: LAW[name] * rng.lognormal(0, 0.02)  # noqa: E731
    return timed(points, law, toy(name), stack=f"s-{name}", timer="device")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    root = tmp_path_factory.mktemp("many")
    for name in ("one", "two", "three"):
        write_rows(root, measured(name, 160), toy(name))
    with pytest.MonkeyPatch.context() as patch:  # a fifth of the work: these laws are simple
        patch.setattr("itercast.learners.models.trees.SEVERAL_GPUS_ROUNDS", 60)
        patch.setattr("itercast.learners.models.ensemble.steps_for", lambda rows: 150)
        train([root], root / "bundle")
    return Bundle.load(root / "bundle")


def median_ape(bundle: Bundle, rows: pd.DataFrame) -> float:
    gpus = {"new": toy("new")}
    guess = bundle.price("gemm", rows, gpus)["predicted_us"].to_numpy()
    return float(np.median(np.abs(guess / rows["time_us"].to_numpy() - 1)) * 100)


def test_seen_gpus_are_forecast_apart_and_unseen_ones_flagged(bundle: Bundle) -> None:
    for name in ("one", "two", "three"):
        assert median_ape(bundle, measured(name, 60, 400)) < 6
    priced = bundle.price("gemm", measured("new", 20, 400), {"new": toy("new")})
    known = bundle.price("gemm", measured("two", 20, 400))
    assert not priced["in_envelope"].any()
    width = np.log(priced["predicted_us_p90"] / priced["predicted_us_p10"]).mean()
    assert width > np.log(known["predicted_us_p90"] / known["predicted_us_p10"]).mean()


def test_a_gpu_never_seen_is_priced_as_its_twin(bundle: Bundle) -> None:
    """``three`` alone is near it, so that the forecasts are its own, not in the envelope though."""
    rows = measured("three", 40, 400)
    twin = rows.assign(gpu="twin").drop(columns="stack")
    known = bundle.price("gemm", rows)
    found = bundle.price("gemm", twin, {"twin": replace(toy("three"), name="twin")})
    assert median_ape(bundle, rows) < 6
    assert found["predicted_us"].to_numpy() == pytest.approx(known["predicted_us"], rel=1e-5)
    assert not found["in_envelope"].any()


def test_a_bundle_knows_which_ops_were_measured_in_a_dtype(bundle: Bundle) -> None:
    assert bundle.models["gemm"].facts["ops"] == {"fp32": ["addmm", "bmm", "grouped_mm", "mm"]}


def test_a_halved_rate_bounds_what_its_units_would_do(bundle: Bundle) -> None:
    """A twin of ``three`` that may use a quarter of its rate takes flops / peak at least."""
    rows = measured("three", 40, 400).assign(gpu="twin").drop(columns="stack")
    full = replace(toy("three"), name="twin")
    quarter = {"fp32": full.peak("fp32") / 4}
    half = replace(full, peak_flops_per_s=quarter, full_rate_flops_per_s=full.peak_flops_per_s)
    free = bundle.price("gemm", rows, {"twin": full})["predicted_us"].to_numpy()
    bound = gemm.flops(rows) / half.peak("fp32") * 1e6
    found = bundle.price("gemm", rows, {"twin": half})["predicted_us"].to_numpy()
    assert found == pytest.approx(np.maximum(free, bound.to_numpy()), rel=1e-5)
    assert (found > free * 1.01).any()
    with switching_off("peak_rate"):
        unbound = bundle.price("gemm", rows, {"twin": half})["predicted_us"]
    assert unbound.to_numpy() == pytest.approx(free)
    assert half.full_rate("fp32") == 4 * half.peak("fp32") == full.full_rate("fp32")


def test_the_envelope_alone_is_what_pricing_finds(bundle: Bundle) -> None:
    """Known and unknown GPUs and sizes in one question, the order of the rows kept."""
    parts = [measured(name, 10, 400) for name in ("new", "two")]
    parts.append(parts[1].assign(m=10**8))
    rows = pd.concat(parts).sample(frac=1, random_state=0, ignore_index=True)
    gpus = {"new": toy("new")}
    priced = bundle.price("gemm", rows, gpus)["in_envelope"]
    assert bundle.inside("gemm", rows, gpus) == priced.tolist()
    assert priced.any()
    assert not priced[(rows["gpu"] == "new") | (rows["m"] == 10**8)].any()


def test_eight_rows_pull_a_new_gpu_close(bundle: Bundle, tmp_path: Path) -> None:
    test = measured("new", 80, 600)
    before = median_ape(bundle, test)
    pulled = calibrate_bundle(bundle, measured("new", 8, 400), {"new": toy("new")})
    pulled.save(tmp_path / "b")
    after = median_ape(Bundle.load(tmp_path / "b"), test)
    assert before > 25
    assert after < 8
    elsewhere = measured("two", 60, 400)
    assert median_ape(pulled, elsewhere) == pytest.approx(median_ape(bundle, elsewhere))


def launched(name: str, size: int, launch_us: float, factor: float = 1.0, **facts: str) -> Any:
    """Five rows of a product timed with its launch."""
    points = [gemm.Gemm(m=size, n=size, k=size)] * 5
    rows = timed(points, lambda p: factor, toy(name), timer="with_launch", **facts)
    return rows.assign(time_us=rows["time_us"] + launch_us)


TWO = {name: toy(name) for name in ("one", "two")}


def test_launches_are_learned_from_small_ops_only() -> None:
    """20 us over the roofline; a GPU of large ops only, twice their roofline, takes the same."""
    rows = [launched("one", 16, 20), launched("two", 4096, 20, factor=2.0)]
    found = learn_launch_us(pd.concat(rows, ignore_index=True), gemm.FAMILY, TWO)
    assert found == {"one": pytest.approx(20), "two": pytest.approx(20)}


def test_a_launch_that_no_row_tells_is_the_usual_host_s() -> None:
    """Large products alone, of one GPU; and rows timed from the host of a family without any."""
    rows, usual_us = launched("one", 4096, 20), load_host().launch_us
    assert usual_us > 0
    assert learn_launch_us(rows, gemm.FAMILY, TWO) == {"one": usual_us}
    assert launch_us(rows, {}).tolist() == [usual_us] * 5


def test_each_software_has_its_own_launch_on_a_gpu() -> None:
    """One waits for the GPU after each call, 40 us; one queues calls back to back, 1 us.

    A GPU of large ops only takes the launch of its own software, another software that of the GPU.
    """
    rows = [launched("one", 16, 40, stack="waits"), launched("one", 16, 1, stack="queues")]
    table = pd.concat([*rows, launched("two", 4096, 40, stack="waits")], ignore_index=True)
    found = learn_launch_us(table, gemm.FAMILY, TWO)
    assert found == {
        "one under waits": pytest.approx(40),
        "one under queues": pytest.approx(1),
        "two under waits": pytest.approx(40),
    }
    assert launch_us(table, found).tolist() == pytest.approx([40] * 5 + [1] * 5 + [40] * 5)
    assert launch_us(table.assign(stack="new"), {"one": 7.0, "two": 9.0}).tolist() == (
        [7] * 10 + [9] * 5
    )
    assert not launch_us(table.assign(timer="device"), found).any()


def test_what_host_events_take_is_no_launch() -> None:
    """They are timed from the host, and 20 us is all theirs."""
    facts = {"gpu": "one", "timer": "with_launch", "time_us": 20.0}
    rows = pd.DataFrame([{**asdict(host.Host(op="backward")), **facts}] * 5)
    assert learn_launch_us(rows, host.FAMILY, {"one": toy("one")}) == {}


def test_calibration_by_hand() -> None:
    """One point 0.3 too low: a forecast of the same point moves by 0.3 p / (p + noise^2)."""
    point = (np.array(["a"], dtype=object), np.zeros((1, 2)))
    shift, share = Calibration(kind=point[0], at=point[1], value=np.array([0.3])).correction(*point)
    prior = SHIFT**2 + KIND**2 + SIZES**2 + DURATION**2
    assert shift[0] == pytest.approx(0.3 * prior / (prior + NOISE**2))
    assert share[0] == pytest.approx(0.3)


def test_errors_of_rows_of_similar_duration_are_correlated() -> None:
    """Of other kinds and sizes: an octave longer shares more of the error than eight do."""
    kinds = np.array(["a", "b", "c"], dtype=object)
    at = points(np.array([[0.0], [99.0], [-99.0]]), np.array([1.0, 2.0, 256.0]))
    found = covariance(kinds[:1], at[:1], kinds, at)[0]
    expected = SHIFT**2 + DURATION**2 * np.exp(-0.5 * np.array([1, 64]) / 9)
    assert found[1:] == pytest.approx(expected)
