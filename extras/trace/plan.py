"""The trace of an iteration under a plan: all stages, all micro-batches, all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from itercast.capture.plan import ParallelPlan
from itercast.compose.simulate.memory.stage_memory import memory, stage_memory
from itercast.compose.simulate.pipeline import action_spans, finish_us, rank_of_chunk, run_as
from itercast.compose.simulate.rank import MESSAGES, Rank
from itercast.compose.simulate.replicas import micro_batches
from itercast.compose.simulate.stage_rank import Pipeline, pipeline_of
from itercast.compose.simulate.timeline import Span
from itercast.extras.trace.events import CHUNK, MOST_EVENTS, THREADS, Part, Trace

WORDS = {"F": "forward", "B": "backward", "W": "weight gradients", "A": "backward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A message between stages: from which action's end it goes, and when the other can start."""

    stage: int
    to: int
    lane: str
    span: Span
    nbytes: float
    name: str


def plan_trace(rank: Rank, optimizer: str) -> Trace:
    """The trace of an iteration of ``rank``'s plan, whose layers show each op.

    Ranks of a stage do the same at the same time: each is a process, or the first of each stage
    where there would be more than MOST_EVENTS.
    """
    plan, trace = rank.plan, Trace()
    if plan.pp > 1:
        pipeline = pipeline_of([rank] * plan.pp, optimizer)
        parts, schedule, sent = _stages(pipeline)
        held: Sequence[Mapping[str, float]] = stage_memory(rank, optimizer)
    else:
        parts, schedule, sent = [_micro_batches(rank, optimizer)], [[]], []
        held = [memory(rank, optimizer)]
    events = sum(2 * len(part.tasks) for mine in parts for part in mine)
    alike = plan.world_size // plan.pp
    shown = alike if events * alike <= MOST_EVENTS else 1
    for stage, (mine, slices, bytes_) in enumerate(zip(parts, schedule, held, strict=True)):
        for i in range(shown):
            number = stage * alike + i
            used = {"schedule", *(task.lanes[0] for part in mine for task in part.tasks)}
            lanes = [lane for lane in THREADS if lane in used]
            lanes += sorted({one.lane for one in sent if one.stage == stage})
            trace.process(number, _name(plan, stage, i, alike, shown), lanes)
            for name, span, micro in slices:
                trace.slice(number, "schedule", name, span, name, micro_batch=micro)
            for part in mine:
                trace.part(number, part)
            trace.memory(number, mine, bytes_)
    for one in sent:
        for i in range(shown):
            source, target = (s * alike + i for s in (one.stage, one.to))
            trace.slice(source, one.lane, one.name, one.span, "comm", bytes=one.nbytes)
            ends = (source, one.lane, one.span.start_us), (target, "schedule", one.span.end_us)
            trace.flow("stages", *ends)
    if [plan.dp > 1, plan.tp > 1, plan.cp > 1].count(True) == 1 and shown > 1:
        _between_ranks(trace, parts, shown)
    return trace


def _name(plan: ParallelPlan, stage: int, i: int, alike: int, shown: int) -> str:
    """A rank's name, with its stage and the number of ranks that do the same."""
    where = f", stage {stage}" if plan.pp > 1 else ""
    others = f", as {alike - 1} others" if shown < alike else ""
    return f"rank {stage * alike + i}{where}{others}"


def _micro_batches(rank: Rank, optimizer: str) -> list[Part]:
    """The runs of a rank without a pipeline, one after the other."""
    before, final = micro_batches(rank, optimizer)
    runs = [run for run, times in before for _ in range(times)]
    parts, start_us = [], 0.0
    for run in (*runs, final):
        parts.append(Part(tasks=run.tasks, spans=run.spans, start_us=start_us))
        start_us += run.end_us
    return parts


Slices = list[tuple[str, Span, int]]


def _stages(found: Pipeline) -> tuple[list[list[Part]], list[Slices], list[_Sent]]:
    """For each stage its runs and its schedule; and the messages between stages."""
    plan = found.plan
    actions, messages = action_spans(plan.schedule, found.times, plan.pp, plan.microbatches)
    ends = finish_us(plan.schedule, found.times, plan.pp, plan.microbatches)
    parts: list[list[Part]] = [[] for _ in range(plan.pp)]
    schedule: list[Slices] = [[] for _ in range(plan.pp)]
    for (kind, micro, c), variant, span in actions:
        r = rank_of_chunk(plan.schedule, plan.pp, c)
        schedule[r].append((WORDS[kind], span, micro))
        run = found.runs[c].of(run_as(kind, plan.schedule), variant)
        start_us = span.start_us
        parts[r].append(Part(tasks=run.tasks, spans=run.spans, start_us=start_us, micro=micro))
    for r, end_us in enumerate(ends):
        parts[r] += _tail(found, r, end_us)
    sent = [
        _Sent(
            stage=rank_of_chunk(plan.schedule, plan.pp, a),
            to=rank_of_chunk(plan.schedule, plan.pp, b),
            lane=f"{CHUNK} {a} to {b}",
            span=span,
            nbytes=sum(op.nbytes for op in ops),
            name=ops[0].op,
        )
        for a, b, span in messages
        if (ops := found.sends[min(a, b)])
    ]
    return parts, schedule, sent


def _tail(found: Pipeline, r: int, end_us: float) -> Iterator[Part]:
    """A rank's part after its last backward, and the messages that overlap that backward."""
    tail = found.tails[r]
    each = found.ranks[r].strategy.scatters_each
    yield Part(
        tasks=tail.run.tasks,
        spans=tail.run.spans,
        start_us=tail.start_us,
        since_us=end_us,
        messages=not each,
    )


def _between_ranks(trace: Trace, parts: Sequence[Sequence[Part]], shown: int) -> None:
    """The arrows between ranks that take part in the same message."""
    for stage, mine in enumerate(parts):
        for part in mine:
            for i, task in enumerate(part.tasks):
                span = part.placed(i)
                lane = task.lanes[0]
                if task.phase != "comm" or span is None or lane not in (*MESSAGES, "compute"):
                    continue
                at = span.start_us
                for k in range(shown - 1):
                    one, other = (stage * shown + k + d for d in (0, 1))
                    trace.flow(task.name, (one, lane, at), (other, lane, at))
