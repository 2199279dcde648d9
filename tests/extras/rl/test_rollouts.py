"""Rollouts and learners, by hand: in turns, beside each other, and what workers buy."""

from dataclasses import replace

import pytest

from itercast.capture.input.lane import Batches, InputLane
from itercast.extras.rl.rollouts import Loop, best_workers, loop_time


def environment(wall: float, cpu: float = 0.0, **facts: float) -> InputLane:
    """An environment whose steps all take ``wall`` us, ``cpu`` of them computing."""
    times = Batches(wall_us=(wall,), cpu_us=(cpu,))
    known = {"worker": times, "prefetch": 1, "batch_samples": 1, "batch_bytes": 0, "cores": 4}
    return InputLane(loader="toy", workers=1, alone=times, **{**known, **facts})  # type: ignore[arg-type]


def loop(workers: int, **facts: float) -> Loop:
    """8 environments, 5 steps of each, a policy of 2 us, 4 updates of 25 us, 4 cores."""
    known = {"envs": 8, "horizon": 5, "policy_us": 2.0, "updates": 4, "update_us": 25.0, "cores": 4}
    return Loop(workers=workers, **{**known, **facts})  # type: ignore[arg-type]


def environments_us(lane: InputLane, workers: int, **facts: float) -> float:
    """Steps of all environments in an iteration."""
    return loop_time(lane, loop(workers, **facts)).stages_us["environments"]


def iteration_us(lane: InputLane, workers: int, **facts: float) -> float:
    """An iteration."""
    return loop_time(lane, loop(workers, **facts)).iteration_us


def test_rollouts_and_learner_take_turns() -> None:
    """A round of 8 environments in 2 workers: 4 * 10 us, and the policy 2; 5 rounds; 4 updates."""
    found = loop_time(environment(10), loop(2))
    stages = {"environments": 5 * 40, "messages": 0, "policy": 5 * 2, "learner": 4 * 25}
    assert found.stages_us == pytest.approx(stages) and found.limit == "environments"
    assert found.iteration_us == pytest.approx(200 + 10 + 100)
    # in the process of the policy: 8 * 10 a round; of 3 workers one has 2 environments, two have 3
    assert environments_us(environment(10), 0) == pytest.approx(5 * 80)
    assert environments_us(environment(10), 3) == pytest.approx(5 * 30)
    assert loop_time(environment(10), loop(2, updates=9)).limit == "learner"


def test_messages_are_the_policy_s_work_and_sending_the_worker_s() -> None:
    """3 us for each of two messages and 1 for each of 8 observations; 7 us to wake processes.

    A step in a worker takes 4 us more than alone.
    """
    sent, stages = Batches(wall_us=(14.0,), cpu_us=(0.0,)), {"observation": 1.0, "waking": 7.0}
    lane = environment(10, worker=sent, receive_us=3, stages_us=stages)  # type: ignore[arg-type]
    assert loop_time(lane, loop(2)).stages_us["messages"] == pytest.approx(5 * (2 * 3 + 8 * 1))
    assert environments_us(lane, 2) == pytest.approx(5 * (4 * 14 + 7))
    assert loop_time(lane, loop(0)).iteration_us == pytest.approx(5 * (80 + 2) + 100)


def test_workers_that_compute_get_no_more_than_the_cores() -> None:
    """8 environments of 10 us on 2 cores take 40 us, in however many workers; waiting is free."""
    assert environments_us(environment(10, 10), 8, cores=2) == pytest.approx(5 * 40)
    assert environments_us(environment(10, 0), 8, cores=2) == pytest.approx(5 * 10)
    # measured to compute 1.5 times as long beside each other
    slow = environment(10, 10, crowd=2, crowding=1.5)
    assert environments_us(slow, 2, cores=2) == pytest.approx(5 * 60)


def test_a_round_waits_for_its_slowest_worker() -> None:
    """Steps of 1 or 9 us, one in each worker: 9 unless both are 1, so 1 + 8 * 3/4 on average."""
    times = Batches(wall_us=(1.0, 9.0), cpu_us=(0.0, 0.0))
    uneven = replace(environment(5), alone=times, worker=times)
    assert environments_us(uneven, 2, envs=2) == pytest.approx(5 * 7, rel=0.01)


def test_the_longer_of_rollouts_and_learner_where_they_are_apart() -> None:
    """Cores for all: 210 us of rollouts beside 100 of the learner, and 30 to copy weights."""
    found = loop_time(environment(10), loop(2, apart=True, weights_us=30))
    assert found.iteration_us == pytest.approx(210) and found.limit == "environments"
    found = loop_time(environment(10), loop(2, apart=True, weights_us=30, updates=20))
    assert found.iteration_us == pytest.approx(530) and found.limit == "learner"


def test_rollouts_and_learner_that_share_two_cores() -> None:
    """Two busy workers and a learner have 2/3 core each; beside the policy all have a core.

    Beside the learner a round is 2 + 8 * 10 / (4/3) = 62 us, in which the learner gets 2 + 40 us
    done: 5 * 42 in 5 rounds. A round alone takes 42. A learner of 105 us is done in the middle.
    """
    lane, facts = environment(10, 10), {"cores": 2, "apart": True, "updates": 1}
    assert iteration_us(lane, 2, update_us=210, **facts) == pytest.approx(5 * 62)
    assert iteration_us(lane, 2, update_us=260, **facts) == pytest.approx(5 * 62 + 50)
    assert iteration_us(lane, 2, update_us=105, **facts) == pytest.approx(2.5 * 62 + 2.5 * 42)


def test_the_workers_that_are_worth_it() -> None:
    """80 us of steps on 4 cores: 80, 80, 40, 20 us with 0, 1, 2, 4 workers, no less with 8."""
    tried = best_workers(environment(10, 10), loop(1))
    assert [one.loop.workers for one in tried] == [0, 1, 2, 4]
    steps = [one.stages_us["environments"] / 5 for one in tried]
    assert steps == pytest.approx([80, 80, 40, 20])


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="workers 9; allowed are 0 to 8"):
        loop(9)
    with pytest.raises(ValueError, match="envs 0; allowed are 1 to"):
        loop(0, envs=0)
