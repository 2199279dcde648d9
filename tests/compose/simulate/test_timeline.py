"""Timelines counted by hand."""

import pytest

from itercast.compose.simulate.timeline import DeadlockError, Span, Task, simulate, simulate_shared

SHARED = {"compute": "gpu", "comm": "gpu"}


def test_all_reduce_waits_for_the_slower_rank() -> None:
    #  r0.compute |==4==|
    #  r1.compute |====6====|
    #  both comm            |==3==|
    both = Task(("r0.comm", "r1.comm"), 3, (0, 1))
    spans = simulate([Task(("r0.compute",), 4), Task(("r1.compute",), 6), both])
    assert spans == [Span(0, 4), Span(0, 6), Span(6, 9)]


def test_a_lane_keeps_its_program_order() -> None:
    #  a |==5==|
    #  b       |=1=|=2=|    the 2 us could start at once, but comes second on its lane
    spans = simulate([Task(("a",), 5), Task(("b",), 1, (0,)), Task(("b",), 2)])
    assert spans[1:] == [Span(5, 6), Span(6, 8)]


def test_tasks_that_wait_for_earlier_ones_are_timed_as_by_a_worklist() -> None:
    """Naming a lane's program, even the order it has anyway, takes the worklist."""
    tasks = [
        Task((f"r{i % 3}",) if i % 5 else ("r0", "r2"), i * 7 % 11, (i // 2, i - 1)[: i % 3])
        for i in range(60)
    ]
    program = {"r1": [i for i, task in enumerate(tasks) if "r1" in task.lanes]}
    assert simulate(tasks) == simulate(tasks, program)


def test_crossed_collectives_are_a_named_deadlock() -> None:
    tasks = [Task(("r0", "r1"), 1, name="first"), Task(("r0", "r1"), 1, name="second")]
    assert simulate(tasks) == [Span(0, 1), Span(1, 2)]
    with pytest.raises(DeadlockError, match="r0: first, r1: second"):
        simulate(tasks, {"r1": [1, 0]})


def test_waiting_for_a_task_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown task 7"):
        simulate([Task(("a",), 1, (7,))])


@pytest.mark.parametrize(
    ("nodes", "ends"), [((1, 1), (8, 10)), ((2, 8), (8, 10)), ((1, 8), (4, 6))]
)
def test_messages_over_other_links_do_not_slow_each_other(
    nodes: tuple[int, int], ends: tuple[int, int]
) -> None:
    """Of 4 and 6 us, side by side: 8 and 4 + 2 of both's at half speed, or as alone."""
    tasks = [Task((lane,), us, nodes=n) for lane, us, n in zip("ab", (4, 6), nodes, strict=True)]
    spans = simulate_shared(tasks, dict.fromkeys("ab", "gpu"), 2.0)
    assert tuple(span.end_us for span in spans) == ends


def test_overlapping_lanes_slow_each_other() -> None:
    #  compute |==4==|===6===|        alone
    #  comm          |=3=|
    #  compute |==4==|===6===|=3=|    shared, contention 2: comm takes 6 of the time 4..10,
    #  comm          |===6===|        compute does 3 of its 6 there and the other 3 after
    tasks = [Task(("compute",), 4), Task(("comm",), 3, (0,)), Task(("compute",), 6)]
    assert simulate_shared(tasks, SHARED, 1) == [Span(0, 4), Span(4, 7), Span(4, 10)]
    assert simulate_shared(tasks, SHARED, 2) == [Span(0, 4), Span(4, 10), Span(4, 13)]


def test_contention_leaves_other_lanes_alone_and_nearly_one_changes_nothing() -> None:
    tasks = [Task(("host",), 5), Task(("compute",), 4, (0,)), Task(("host",), 5)]
    assert simulate_shared(tasks, SHARED, 2) == simulate(tasks)
    tasks = [
        Task(("comm", "compute")[i % 2 :][:1], i % 5, (i - 1,) * (i % 7 == 3)) for i in range(40)
    ]
    for near, exact in zip(simulate_shared(tasks, SHARED, 1 + 1e-12), simulate(tasks), strict=True):
        assert near.end_us == pytest.approx(exact.end_us)


@pytest.mark.parametrize("duration_us", [-1.0, float("nan")])
def test_what_is_no_duration_is_refused(duration_us: float) -> None:
    """A lane would never get done with it."""
    tasks = [Task(("compute",), 1.0), Task(("compute",), duration_us)]
    for run in (simulate, lambda found: simulate_shared(found, SHARED, 2.0)):
        with pytest.raises(ValueError, match="task 1 needs lanes and a duration >= 0"):
            run(tasks)


def test_tasks_of_different_devices_do_not_slow_each_other() -> None:
    """Two ranks compute side by side; only the second also sends."""
    tasks = [Task(("0 compute",), 4), Task(("1 compute",), 4), Task(("1 comm",), 3)]
    devices = {"0 compute": "0", "1 compute": "1", "1 comm": "1"}
    # rank 1: 3 us of both take 6, then 1 us of compute is left
    assert simulate_shared(tasks, devices, 2) == [Span(0, 4), Span(0, 7), Span(0, 6)]
