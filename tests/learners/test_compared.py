"""The learners that the blend is compared with: what each of them sees, and that it learns."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from itercast.learners.bundle import Bundle
from itercast.learners.models.compared import LEARNERS, NAMES, Inputs
from itercast.learners.models.noise import medians
from itercast.learners.train import SCORES, errors


def inputs(count: int, seed: int = 0) -> Inputs:
    """Rows of two numbers, whose roofline is their product."""
    raw = np.random.default_rng(seed).uniform(1, 100, (count, 2)).astype(np.float32)
    product = raw.prod(1).astype(float)
    x = np.c_[np.log2(raw), np.log2(product)].astype(np.float32)
    return Inputs(x=x, roofline_us=product)


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


def test_every_learner_is_scored(learned: Path) -> None:
    """On shapes that were held out; the scaled roofline is the worst of all."""
    scores = json.loads((learned / "bundle" / SCORES).read_text())["gemm"]["learners"]
    assert set(scores) == {*NAMES}
    worst = scores.pop("roofline")["median_ape_pct"]
    assert all(score["median_ape_pct"] < worst for score in scores.values())


def test_a_bundle_with_another_learner_is_refused(learned: Path, tmp_path: Path) -> None:
    """Bundles of versions in which simpler learners could price a family."""
    shutil.copytree(learned / "bundle", tmp_path / "old")
    path = tmp_path / "old" / "bundle.json"
    facts = json.loads(path.read_text())
    facts["families"]["gemm"]["learner"] = {"name": "tile-mlp"}
    del facts["digests"]
    path.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"old' cannot be used: learner 'tile-mlp' of gemm"):
        Bundle.load(tmp_path / "old")


def test_differences_within_the_noise_share_a_rank() -> None:
    """Errors of 10 and 30 % on 100 shapes, and 10.1 %: ranks 1, 3 and 1; under 10 shapes all 1."""
    off = np.random.default_rng(0).choice([-1, 1], 100)
    tried = {name: np.log(1 + error * off) for name, error in [("a", 0.1), ("b", 0.3)]}
    tried["c"] = np.log(1 + 0.101 * np.random.default_rng(1).choice([-1, 1], 100))
    noisy = {name: e + np.random.default_rng(2).normal(0, 0.02, 100) for name, e in tried.items()}
    assert medians(noisy, np.arange(100)).ranks() == {"a": 1, "b": 3, "c": 1}
    assert medians(noisy, np.arange(100) % 9).ranks() == {"a": 1, "b": 1, "c": 1}
    assert medians(noisy, np.arange(100), retest_ape_pct=60).ranks() == {"a": 1, "b": 1, "c": 1}
