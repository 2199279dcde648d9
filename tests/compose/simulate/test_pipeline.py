"""Pipeline schedules against the task simulation, and their known bubbles."""

from __future__ import annotations

import random

import pytest

from itercast.compose.simulate.pipeline import StageTimes, finish_us, in_flight, program
from itercast.compose.simulate.timeline import Task, simulate

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb", 1)]


def as_tasks(
    schedule: str, chunks: list[StageTimes], stages: int, micro: int
) -> tuple[list[Task], dict[str, list[int]]]:
    """The schedule as tasks on ranks and links, and the order of each rank's tasks."""
    made, index = list[Task](), dict[tuple[str, int, int], int]()

    def add(key: tuple[str, int, int], lane: str, us: float, *after: tuple[str, int, int]) -> None:
        index[key] = len(made)
        made.append(Task((lane,), us, tuple(index[other] for other in after)))

    last, zero_bubble = len(chunks) - 1, schedule == "zb"
    for i in range(micro):
        for c, x in enumerate(chunks):
            add(("F", i, c), f"rank {c % stages}", x.forward_us, *[("send", i, c - 1)][: c > 0])
            add(("send", i, c), f"link {c}", x.send_us, ("F", i, c))
        for c, x in reversed(list(enumerate(chunks))):
            rank, late_us = f"rank {c % stages}", x.weight_us * zero_bubble
            before = ("back", i, c + 1) if c < last else ("F", i, c)
            add(("B", i, c), rank, x.backward_us - late_us, before)
            add(("back", i, c), f"link back {c}", chunks[c - 1].send_us, ("B", i, c))
            if zero_bubble:
                add(("W", i, c), rank, late_us, ("B", i, c))
    virtual = len(chunks) // stages
    return made, {
        f"rank {r}": [
            index[kind, i, v * stages + r]
            for kind, i, v in program(schedule, stages, r, micro, virtual)
        ]
        for r in range(stages)
    }


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("seed", range(5))
def test_the_longest_path_is_what_the_simulation_finds(
    schedule: str, virtual: int, seed: int
) -> None:
    rng = random.Random(seed)
    stages = rng.randint(2, 5)
    micro = stages * rng.randint(1, 4) if virtual > 1 else rng.randint(1, 12)
    chunks = [
        StageTimes(
            forward_us=rng.uniform(1, 3),
            backward_us=rng.uniform(2, 6),
            weight_us=rng.uniform(0, 2),
            send_us=rng.uniform(0, 2),
        )
        for _ in range(stages * virtual)
    ]
    tasks, programs = as_tasks(schedule, chunks, stages, micro)
    spans = simulate(tasks, programs)
    ends = [max(spans[i].end_us for i in programs[f"rank {r}"]) for r in range(stages)]
    assert finish_us(schedule, chunks, stages, micro) == pytest.approx(ends)


@pytest.mark.parametrize(("stages", "micro"), [(2, 2), (4, 8), (8, 64), (4, 2)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_equal_stages(schedule: str, stages: int, micro: int) -> None:
    """(p-1)/(m+p-1) of the time, with fewer micro-batches than stages as well."""
    stage = StageTimes(forward_us=1, backward_us=2)
    end_us = max(finish_us(schedule, [stage] * stages, stages, micro))
    assert 1 - 3 * micro / end_us == pytest.approx((stages - 1) / (micro + stages - 1))


def test_interleaving_divides_the_bubble_and_zero_bubble_leaves_a_third() -> None:
    half = StageTimes(forward_us=0.5, backward_us=1)
    assert max(finish_us("interleaved", [half] * 8, 4, 8)) == pytest.approx(24 + 9 / 2)
    whole = StageTimes(forward_us=1, backward_us=2, weight_us=1)
    assert max(finish_us("zb", [whole] * 4, 4, 8)) == pytest.approx(24 + 3)


def test_micro_batches_in_flight() -> None:
    assert [in_flight("1f1b", 4, r, 8) for r in range(4)] == [(4,), (3,), (2,), (1,)]
    assert in_flight("1f1b", 4, 0, 2) == (2,)
    assert in_flight("gpipe", 4, 0, 8) == (8,)
    assert sum(in_flight("interleaved", 4, 0, 8, 2)) == 2 * 3 + 4 + 1  # warm-up and one more
