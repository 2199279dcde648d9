"""The learners that the blend is compared with: what each of them sees, and that it learns."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from toy_products import TOY, products, timed, write_rows

from itercast.learners.bundle import Bundle
from itercast.learners.compare import learner_models
from itercast.learners.family_model import prepare
from itercast.learners.models.compared import LEARNERS, NAMES, Inputs, tile_waves
from itercast.learners.models.noise import medians
from itercast.learners.models.tile_network import fit_tiles, tiles_us
from itercast.learners.train import SCORES, errors, train
from itercast.microbench.ops.matrix import gemm


def inputs(count: int, seed: int = 0) -> Inputs:
    """Rows of two numbers, whose roofline is their product."""
    raw = np.random.default_rng(seed).uniform(1, 100, (count, 2)).astype(np.float32)
    product = raw.prod(1).astype(float)
    x = np.c_[np.log2(raw), np.log2(product)].astype(np.float32)
    return Inputs(x=x, roofline_us=product, waves=product / 100)


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_learns_a_constant_factor(name: str) -> None:
    """Times are twice the roofline; unseen rows are forecast within 15 % (median)."""
    known, asked = inputs(400), inputs(50, seed=1)
    guess = LEARNERS[name](known, 2 * known.roofline_us)(asked)
    assert errors(guess, 2 * asked.roofline_us)["median_ape_pct"] < 15


def test_the_scaled_roofline_by_hand() -> None:
    """Times over rooflines are 1, 3 and 5: their median is 3."""
    known = inputs(3)
    guess = LEARNERS["roofline"](known, known.roofline_us * [1, 3, 5])(known)
    assert guess == pytest.approx(3 * known.roofline_us)


def test_utilisation_grows_with_waves() -> None:
    """A law of 0.9 - 0.4 / waves is found within 10 %, without a feature that says it."""
    rng = np.random.default_rng(0)
    x, waves = rng.normal(size=(500, 3)).astype(np.float32), rng.integers(1, 9, 500).astype(float)
    roof_us = rng.uniform(10, 1000, 500)
    time_us = roof_us / (0.9 - 0.4 / waves)
    guess = tiles_us(fit_tiles(x, roof_us, waves, time_us), x, roof_us, waves)
    assert errors(guess, time_us)["median_ape_pct"] < 10


def test_waves_of_an_op_without_tiles_follow_its_bytes() -> None:
    """2^20 bytes are 16 tiles of 64 KiB: two waves on 8 cores."""
    features = {"log_bytes": np.array([20.0])}
    assert tile_waves(pd.DataFrame({"gpu": ["toy"]}), features, {"toy": TOY}) == [2.0]


def test_a_family_is_priced_by_every_learner(learned: Path, tmp_path: Path) -> None:
    """Each is scored, prices rows nearer than the roofline, and prices alike once saved."""
    measured, bundle = products(160), Bundle.load(learned / "bundle")
    assert set(json.loads((learned / "bundle" / SCORES).read_text())["gemm"]["learners"]) == {
        *NAMES
    }
    others = learner_models(bundle.models["gemm"], prepare(measured, gemm.FAMILY, {"toy": TOY}))
    assert {*others, "blend"} == set(NAMES)
    found = {}
    for name, one in others.items():
        saved = replace(bundle, models={"gemm": one})
        saved.save(tmp_path / name)
        priced = saved.price("gemm", measured)
        again = Bundle.load(tmp_path / name)
        pd.testing.assert_frame_equal(again.price("gemm", measured), priced)
        assert again.models["gemm"].facts["learner"] == name
        assert (priced["predicted_us_p10"] <= priced["predicted_us_p90"]).all()
        found[name] = errors(priced["predicted_us"].to_numpy(), measured["time_us"].to_numpy())
    worst = found.pop("roofline")["median_ape_pct"]
    assert all(scores["median_ape_pct"] < worst for scores in found.values())


def test_the_learner_that_is_better_beyond_the_noise_prices_the_family(tmp_path: Path) -> None:
    """A quarter is ten times slower at random: the blend is led astray, a median factor is not."""
    rng = np.random.default_rng(0)
    at_random = timed(islice(gemm.sweep(), 150), lambda p: 3 * rng.choice([1, 10], p=[0.75, 0.25]))
    root = write_rows(tmp_path, at_random)
    report = train([root], root / "bundle", compare=True).families["gemm"]
    assert report.learner == "roofline"
    assert report.learners["roofline"]["rank"] < report.learners["blend"]["rank"]
    bundle = Bundle.load(tmp_path / "bundle")
    asked = pd.DataFrame({"op": ["mm"], "m": [512], "n": [512], "k": [512], "gpu": ["toy"]})
    roof_us = 2 * 512**3 / 1e13 * 1e6
    priced = bundle.price("gemm", asked.assign(dtype="fp32", batch=1, layout="nn"))
    assert priced["predicted_us"].item() == pytest.approx(3 * roof_us, rel=0.25)
    assert priced["predicted_us_p90"].item() > 2 * priced["predicted_us"].item()


def test_differences_within_the_noise_share_a_rank() -> None:
    """Errors of 10 and 30 % on 100 shapes, and 10.1 %: ranks 1, 3 and 1; under 10 shapes all 1."""
    off = np.random.default_rng(0).choice([-1, 1], 100)
    tried = {name: np.log(1 + error * off) for name, error in [("a", 0.1), ("b", 0.3)]}
    tried["c"] = np.log(1 + 0.101 * np.random.default_rng(1).choice([-1, 1], 100))
    noisy = {name: e + np.random.default_rng(2).normal(0, 0.02, 100) for name, e in tried.items()}
    assert medians(noisy, np.arange(100)).ranks() == {"a": 1, "b": 3, "c": 1}
    assert medians(noisy, np.arange(100) % 9).ranks() == {"a": 1, "b": 1, "c": 1}
    assert medians(noisy, np.arange(100), retest_ape_pct=60).ranks() == {"a": 1, "b": 1, "c": 1}
