"""Jobs that a scheduler resizes: deals counted by hand and by trying all of them."""

import random
from itertools import product

import pytest

from itercast.extras.schedulers.elastic import RESIZE_S, _Running, best_places
from itercast.extras.schedulers.jobs import Job, _speeds
from itercast.extras.schedulers.replay import ELASTIC, replay


def job(arrival_s: float, speeds: dict[tuple[str, int], float], gpus: int = 1) -> Job:
    """A job that asks for so many GPUs of any kind that has them."""
    seconds = {gpu: 1 / speed for (gpu, n), speed in speeds.items() if n == gpus}
    return Job(arrival_s=arrival_s, gpus=gpus, seconds_on=seconds, speeds=speeds)


def test_a_job_grows_and_shrinks_as_others_come_and_go() -> None:
    """180 steps at 1 step/s on one GPU, 1.8 on two; a second job arrives after 50 s.

    The first has both GPUs until then and has done half. With one each, 2 asked speeds are more
    than 1.8: it stands still for 30 s and ends its other half at 80 + 90 = 170. The second has done
    120 of 180 steps by then, stands still, and ends the rest on two at 200 + 33.3.
    """
    speeds = {("fast", 1): 1 / 180, ("fast", 2): 1.8 / 180}
    jobs = [job(0, speeds), job(50, speeds)]
    assert RESIZE_S == 30
    found = replay(jobs, {"fast": 2}, ELASTIC)
    ends = (170, 200 + 100 / 3)
    assert found.makespan_s == pytest.approx(ends[1])
    assert found.mean_completion_s == pytest.approx((ends[0] + ends[1] - 50) / 2)
    assert found.gpu_hours == pytest.approx(2 * ends[1] / 3600)
    assert replay(jobs, {"fast": 2}, "fifo").mean_completion_s == pytest.approx(180)


def test_the_deal_is_the_best_of_all() -> None:
    """Three jobs, two kinds of two GPUs: every deal that fits is tried."""
    draw, cluster = random.Random(3), {"a": 2, "b": 2}
    for _ in range(20):
        places = [(gpu, n) for gpu in cluster for n in (1, 2)]
        running = [_Running(job(0, {p: draw.uniform(1, 9) for p in places})) for _ in range(3)]

        def total(deal: tuple[tuple[str, int], ...], running: list[_Running] = running) -> float:
            used = {gpu: sum(n for kind, n in deal if kind == gpu) for gpu in cluster}
            fits = all(used[gpu] <= cluster[gpu] for gpu in cluster)
            pairs = zip(running, deal, strict=True)
            return sum(r.speed(p) / r.job.asked for r, p in pairs) if fits else -1.0

        best = max(total(deal) for deal in product([("", 0), *places], repeat=3))
        assert total(tuple(best_places(running, cluster))) == pytest.approx(best)


def test_the_least_gpu_time_comes_first() -> None:
    """One job of 4 GPUs for 30 s, one of 1 GPU for 100 s: 120 against 100 GPU seconds.

    After a job that holds all four until 10: the longer, narrower one starts first, and the other
    when it ends.
    """
    first, wide = job(0, {("a", 4): 1 / 10}, 4), job(1, {("a", 4): 1 / 30}, 4)
    narrow = job(2, {("a", 1): 1 / 100})
    jobs, cluster = [first, wide, narrow], {"a": 4}
    short = replay(jobs, cluster, "shortest first, best GPU")
    least = replay(jobs, cluster, "least GPU time first, best GPU")
    assert short.makespan_s == 140 and least.makespan_s == 140
    assert short.mean_completion_s == pytest.approx((10 + 39 + 138) / 3)
    assert least.mean_completion_s == pytest.approx((10 + 139 + 108) / 3)


def test_batches_of_a_model_are_chosen_too() -> None:
    """1,000 steps of 8 samples: 100 steps/s of 8, or 70 of 16, which are 140 of 8."""
    rates = {("m (batch size 8)", 1): {"a": 100.0}, ("m (batch size 16)", 1): {"a": 70.0}}
    rates |= {("other (batch size 8)", 1): {"a": 900.0}}
    assert _speeds("m (batch size 8)", 1_000, rates) == {("a", 1): pytest.approx(0.14)}
