"""Steps of noisy ranks: closed forms against draws, laws, and what `predict --spread` prints."""

import json
from dataclasses import replace
from math import exp, sqrt
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from plan_case import GPU, forecast_of
from typed_commands import typed

from itercast.extras.noise.spread import SIGMA, Spread, mean_slowdown, step_spread
from itercast.learners.bundle import Bundle
from itercast.microbench.store import read_rows

ROOT = Path(__file__).parents[3]

FOUND = forecast_of(  # 70 us of kernels, 10 of the host, 15 of messages, 5 of bubble
    iteration_us=100.0,
    compute_us=70.0,
    exposed_comm_us=15.0,
    idle_us=15.0,
    idle_by_us={"host": 10.0, "bubble": 5.0, "waiting": 0.0},
)


def spread(ranks: int, sigma: float = 0.1) -> Spread:
    return step_spread(replace(FOUND, world_size=ranks), sigma)


def times(found: Spread) -> list[float]:
    return [found.p10_us, found.median_us, found.p90_us, found.mean_us]


@pytest.mark.parametrize("ranks", [2, 64])
def test_the_slowest_of_drawn_ranks_takes_as_long(ranks: int) -> None:
    """40,000 steps: 80 of 100 us on each rank times e**(0.1 x), the slowest, and 20 us for all."""
    drawn = np.random.default_rng(0).standard_normal((40_000, ranks))
    steps = 20 + 80 * np.exp(0.1 * drawn).max(axis=1)
    seen = [*np.quantile(steps, [0.1, 0.5, 0.9]), steps.mean()]
    assert times(spread(ranks)) == pytest.approx(seen, rel=2e-3)


def test_the_mean_is_the_closed_form_of_one_and_two_ranks() -> None:
    """Lognormal: e**(sigma**2 / 2); the larger of two: twice that times Phi(sigma / sqrt 2)."""
    one, both = exp(0.1**2 / 2), 2 * NormalDist().cdf(0.1 / sqrt(2))
    assert mean_slowdown(0.1, 1) == pytest.approx(one, rel=1e-4)
    assert mean_slowdown(0.1, 2) == pytest.approx(one * both, rel=1e-4)
    assert spread(2).mean_us == pytest.approx(20 + 80 * one * both, rel=1e-4)
    assert spread(1).mean_us_by_ranks[64] == spread(64).mean_us


def test_one_rank_takes_its_forecast() -> None:
    """The median is the forecast; a tenth of steps is below e**-1.2816 sigma of what it does."""
    found = spread(1)
    assert found.own_us == 80 and found.median_us == pytest.approx(100)
    assert found.p10_us == pytest.approx(20 + 80 * exp(-0.12816), rel=1e-5)
    assert found.p90_us == pytest.approx(20 + 80 * exp(0.12816), rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 8, 10**16])
def test_ranks_without_noise_take_exactly_the_forecast(ranks: int) -> None:
    found = spread(ranks, 0.0)
    assert times(found) == [100.0] * 4 and set(found.mean_us_by_ranks.values()) == {100.0}


def test_the_assumed_noise_of_cpus_is_that_of_measured_iterations_of_one_process() -> None:
    """The 80 and 20 % quantiles of a standard normal number are 1.6832 apart."""
    rows = read_rows([ROOT / "datasets"], "iteration")
    alone = rows[~rows["plan"].str.contains(r"\b[dtpc]p=")]
    sigmas = np.log(alone["time_us_p80"] / alone["time_us_p20"]) / 1.6832
    assert len(sigmas) == 84 and sigmas.median() == pytest.approx(SIGMA["cpu"], rel=0.01)


def test_predict_reports_the_spread_over_all_ranks_of_a_plan(tmp_path: Path) -> None:
    """4 ranks: two replicas of two stages; every number of the forecast itself stays as it is."""
    Bundle(models={}, gpus={GPU.name: GPU}).save(tmp_path / "b")
    command = f"predict gpt-s --gpu {GPU.name} --bundle {tmp_path / 'b'} --plan dp=2,pp=2".split()

    def printed(*words: str) -> str:
        return typed(*command, *words).stdout

    plain, noisy = json.loads(printed("--json")), json.loads(printed("--json", "--spread"))
    found = noisy.pop("spread")
    assert noisy == plain and "slowest of 4 ranks" in printed("--spread")
    assert (found["ranks"], found["sigma"]) == (4, SIGMA["gpu"])
    assert found["own_us"] == plain["compute_us"] + plain["idle_by_us"]["host"]
    assert found["own_us"] < plain["iteration_us"] < found["median_us"] < found["mean_us"]
