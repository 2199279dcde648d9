"""Pipeline schedules against the task simulation, and their known bubbles."""

import random
from dataclasses import replace

import pytest
import torch
from law_case import rank_for
from torch import nn

from itercast.compose.capture_model import capture
from itercast.compose.simulate.pipeline import (
    CUT_BACKWARD,
    StageTimes,
    action_spans,
    chunks_of_rank,
    finish_us,
    in_flight,
    program,
    rank_of_chunk,
)
from itercast.compose.simulate.stages import chunks_of
from itercast.compose.simulate.timeline import Span, Task, simulate

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb", 1), ("zbv", 2), ("dualpipev", 2)]


def as_tasks(
    schedule: str, chunks: list[StageTimes], stages: int, micro: int
) -> tuple[list[Task], dict[str, list[int]]]:
    """The schedule as tasks on ranks and links, and the order of each rank's tasks."""
    made, index = list[Task](), dict[tuple[str, int, int], int]()

    def add(key: tuple[str, int, int], lane: str, us: float, *after: tuple[str, int, int]) -> None:
        index[key] = len(made)
        made.append(Task((lane,), us, tuple(index[other] for other in after)))

    last, virtual = len(chunks) - 1, len(chunks) // stages
    orders = [program(schedule, stages, r, micro, virtual) for r in range(stages)]
    of = [chunks_of_rank(schedule, stages, r, len(chunks)) for r in range(stages)]
    actions = {(k, i, of[r][v]) for r, order in enumerate(orders) for k, i, v in order}
    for i in range(micro):
        for c, x in enumerate(chunks):
            lane = f"rank {rank_of_chunk(schedule, stages, c)}"
            add(("F", i, c), lane, x.forward_us, *[("send", i, c - 1)][: c > 0])
            add(("send", i, c), f"link {c}", x.send_us, ("F", i, c))
        for c, x in reversed(list(enumerate(chunks))):
            rank = f"rank {rank_of_chunk(schedule, stages, c)}"
            cut = schedule in CUT_BACKWARD and ("W", i, c) in actions
            before = ("back", i, c + 1) if c < last else ("F", i, c)
            add(("B", i, c), rank, x.input_us if cut else x.backward_us, before)
            add(("back", i, c), f"link back {c}", chunks[c - 1].send_us, ("B", i, c))
            if cut:
                add(("W", i, c), rank, x.weight_us, ("B", i, c))
    return made, {
        f"rank {r}": [index["B" if kind == "A" else kind, i, of[r][v]] for kind, i, v in order]
        for r, order in enumerate(orders)
    }


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("seed", range(5))
def test_the_longest_path_is_what_the_simulation_finds(
    schedule: str, virtual: int, seed: int
) -> None:
    rng = random.Random(seed)
    stages = rng.randint(2, 5)
    micro = stages * rng.randint(2, 4) if virtual > 1 else rng.randint(1, 12)
    chunks = [
        StageTimes(
            forward_us=rng.uniform(1, 3),
            backward_us=rng.uniform(2, 6),
            input_us=rng.uniform(1, 3),
            weight_us=rng.uniform(0, 2),
            send_us=rng.uniform(0, 2),
        )
        for _ in range(stages * virtual)
    ]
    tasks, programs = as_tasks(schedule, chunks, stages, micro)
    spans = simulate(tasks, programs)
    ends = [max(spans[i].end_us for i in programs[f"rank {r}"]) for r in range(stages)]
    assert finish_us(schedule, chunks, stages, micro) == pytest.approx(ends)
    actions, messages = action_spans(schedule, chunks, stages, micro)
    for r in range(stages):
        own = [s for (*_, c), _, s in actions if rank_of_chunk(schedule, stages, c) == r]
        theirs = [spans[i] for i in programs[f"rank {r}"]]
        assert times(own) == pytest.approx(times(theirs))
    sent = sorted(s.end_us for *_, s in messages)
    links = [s.end_us for t, s in zip(tasks, spans, strict=True) if is_sent(t, len(chunks))]
    assert sent == pytest.approx(sorted(links))


def times(spans: list[Span]) -> list[float]:
    """Starts and ends in us."""
    return [us for s in spans for us in (s.start_us, s.end_us)]


def is_sent(task: Task, chunks: int) -> bool:
    """Whether a task is a message between two chunks."""
    (lane,) = task.lanes
    return lane.startswith("link") and lane not in (f"link {chunks - 1}", "link back 0")


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
    whole = StageTimes(forward_us=1, backward_us=2, input_us=1, weight_us=1)
    assert max(finish_us("zb", [whole] * 4, 4, 8)) == pytest.approx(24 + 3)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_v_shaped_orders_are_torch_s(schedule: str) -> None:
    """Action by action the tables that torch.distributed.pipelining makes for each rank."""
    from torch.distributed.pipelining import schedules

    name = {"zbv": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV"}[schedule]
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "A"}
    for stages, micro in [(2, 1), (2, 4), (3, 5), (3, 9), (4, 8), (4, 17), (5, 10)]:
        if schedule == "dualpipev" and micro < 2 * stages:
            continue
        table = object.__new__(getattr(schedules, name))
        table.pp_group_size, table._n_microbatches, table.num_stages = stages, micro, 2 * stages
        for r in range(stages):
            steps = (a for a in table._calculate_single_rank_operations(r) if a is not None)
            both = (one for a in steps for one in a.sub_actions or (a,))
            theirs = [
                (kinds[x.computation_type.name], x.microbatch_index, int(x.stage_index != r))
                for x in both
            ]
            assert list(program(schedule, stages, r, micro, 2)) == theirs


def test_v_shaped_schedules_leave_the_way_to_the_last_rank() -> None:
    """Chunks of 0.5 for each of forward, inputs and weights on four ranks: 3 * 0.5 of 24 + 1.5.

    With zbv every rank holds as many activations, of chunks half as large.
    """
    half = StageTimes(forward_us=0.5, backward_us=1, input_us=0.5, weight_us=0.5)
    for schedule in ("zbv", "dualpipev"):
        assert max(finish_us(schedule, [half] * 8, 4, 8)) == pytest.approx(24 + 1.5)
    for r in range(4):
        assert [*map(sum, in_flight("zbv", 4, r, 8, 2))] == [8, 8]
    assert [rank_of_chunk("zbv", 4, c) for c in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_micro_batches_in_flight() -> None:
    """In the first backward, then later: another forward follows it while there are any.

    Cut backwards (zb) hold a micro-batch until its weight gradients: as many as the first rank.
    """
    assert [in_flight("1f1b", 4, r, 8) for r in range(4)] == [((n,), (n,)) for n in (4, 3, 2, 1)]
    assert in_flight("1f1b", 4, 0, 2) == ((2,), (1,))
    assert in_flight("gpipe", 4, 0, 8) == ((8,), (7,))
    assert [in_flight("zb", 4, r, 8) for r in range(4)] == [((4 - r,), (4,)) for r in range(4)]
    first, later = in_flight("interleaved", 4, 0, 8, 2)
    assert sum(first) == sum(later) == 2 * 3 + 4 + 1  # warm-up and one more


class Segments(nn.Module):
    """Four layers, each with a loss of its own on what the one before gives, detached or not."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = []
        for block in self.blocks:
            x = block(x).relu()
            losses.append(x.square().sum())
            x = x.detach() if self.detached else x
        return torch.stack(losses).sum()


@pytest.mark.parametrize("detached", [False, True])
def test_segments_with_losses_of_their_own_wait_for_no_gradient(detached: bool) -> None:
    found = capture(Segments(detached=detached), torch.zeros(64, 64), batch=64)
    chunks = chunks_of(rank_for(found, "pp=4,micro=8"))
    told = [c.is_detached(found) for c in chunks[:-1]]
    assert told == [detached] * 3


def test_a_detached_stage_runs_backward_after_its_own_forward() -> None:
    """Two stages, two micro-batches of a forward of 1 and a backward of 2, messages of 1.

    Attached, 1F1B: the first stage's B0 starts at 6 = F0 1, message 2, F0 3, B0 5, message 6, and
    ends at 8; its second waits for the other's B1 at 8 and its message: 9 to 11. Detached it runs
    F0 F1 B0 B1 without a wait: 1 + 1 + 2 + 2 = 6; the second starts at 2 and ends at 2 + 2 * 3 = 8.
    """
    attached = [StageTimes(forward_us=1, backward_us=2, send_us=1) for _ in range(2)]
    assert finish_us("1f1b", attached, 2, 2) == pytest.approx((11, 8))
    alone = [replace(attached[0], detached=True), attached[1]]
    assert finish_us("1f1b", alone, 2, 2) == pytest.approx((6, 8))
