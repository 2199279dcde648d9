"""Splits a step over unlike GPUs, its batch or its layers, as is fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from math import ceil, lcm
from typing import TypeVar

import numpy as np

from itercast.capture.plan import ParallelPlan, micro_batch
from itercast.capture.plan_keys import V_SHAPED
from itercast.compose.forecast import Forecast
from itercast.compose.pricing.priced_op import AssumedTime
from itercast.compose.simulate.breakdown import Outcome, Tally
from itercast.compose.simulate.iteration import evaluate_ranks, quick_us
from itercast.compose.simulate.rank import Rank
from itercast.compose.simulate.stages import balanced
from itercast.extras.clusters.job import Job, replicas, report_job, rounds, stages

# Keys of plans that act on one rank, or on replicas that all send the same messages.
ALLOWED = (
    *("dp", "tp", "sp", "tp_overlap", "pp", "amp", "zero", "micro", "accumulate"),
    *("first", "last", "layers", "schedule", "virtual", "recompute", "recomputed", "offload"),
    *("compress", "compress_tp", "compress_pp", "coconet", "local", "sampled", "outer"),
    *("gossip", "sends"),
)
MOST_GROUPS = 6  # whose every choice is simulated: 63 rounds
T = TypeVar("T")


def forecast_job(job: Job, plan: ParallelPlan) -> Forecast:
    """Forecast a step with the split of its batch (pp=1) or of its layers that is fastest."""
    file = job.cluster
    text, unequal = f"plan {str(plan)!r}", [key for key in plan.stated if key not in ALLOWED]
    if unequal or plan.schedule in V_SHAPED:
        wrong, known = ", ".join(unequal) or plan.schedule, ", ".join(ALLOWED)
        raise ValueError(f"{text}: {wrong} needs equal GPUs; allowed on a cluster: {known}")
    if plan.world_size != file.gpus:
        raise ValueError(f"{text} has {plan.world_size} ranks, {file.path} {file.gpus} GPUs")
    if plan.sampled < 1 and len(file.groups) > MOST_GROUPS:
        rule = f"participants are sampled of {MOST_GROUPS} groups at most"
        raise ValueError(f"{text}: {rule}; {file.path} has {len(file.groups)}")
    each = plan.tp if plan.pp == 1 else plan.tp * plan.dp
    for group in file.groups:
        if group.count % each:
            what = "replica" if plan.pp == 1 else "stage"
            rule = f"a {what} has {each} GPUs of one kind"
            raise ValueError(f"{text}: {rule}; group {group.name!r} has {group.count}")
    if plan.pp == 1:
        return _split_batch(job, plan)
    return _split_layers(job, plan)


def _split_batch(job: Job, plan: ParallelPlan) -> Forecast:
    """Search samples of a micro-batch by group: from balanced ones on, one step at a time."""
    groups = job.cluster.groups
    counts, stated = [g.count // plan.tp for g in groups], [g.rows for g in groups]
    rows, rest = divmod(job.samples, plan.microbatches)
    curves = _curves(job, plan, counts, rows)
    start = _least_maximum(curves, counts, rows, stated)
    if rest or start is None:
        rows_text = " + ".join(
            f"{n} x {fixed or 'rows'}" for n, fixed in zip(counts, stated, strict=True)
        )
        cut = f"{plan.microbatches} micro-batches of {job.samples} samples"
        raise ValueError(f"{job.cluster.path}: {rows_text} make no {cut}")

    @cache
    def simulated(split: tuple[int, ...]) -> Outcome:
        return _side_by_side(job, plan, split)

    def others(split: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for a, b in permutations(range(len(split)), 2):
            step, moved = lcm(counts[a], counts[b]), list(split)
            moved[a] -= step // counts[a]
            moved[b] += step // counts[b]
            if moved[a] > 0 and not stated[a] and not stated[b]:
                yield tuple(moved)

    best = _descend(start, others, lambda split: simulated(split).iteration_us)
    equal = rows % plan.dp == 0 and not any(stated)
    even_us = simulated((rows // plan.dp,) * len(groups)).iteration_us if equal else 0.0
    shares = [{"rows": n} for n in best]
    return report_job(job, plan, simulated(best), groups, shares, even_us)


def _curves(job: Job, plan: ParallelPlan, counts: Sequence[int], rows: int) -> list[np.ndarray]:
    """By group the time in us of a replica alone with 0, 1, 2... samples.

    Priced at powers of two and at the most samples, linear between.
    """
    most = [max(1, (rows - sum(counts) + n) // n) for n in counts]
    sizes = range(1, max(most) + 1)
    job.captures.announce((samples, job.seq, plan.autocast) for samples in sizes)
    curves = []
    for group, limit in zip(job.cluster.groups, most, strict=True):
        sizes_timed = sorted({limit, *(2**n for n in range(limit.bit_length()))})
        us = [quick_us(job.rank(group, plan, n), job.optimizer) for n in sizes_timed]
        curves.append(np.interp(np.arange(limit + 1), sizes_timed, us))
    return curves


def _least_maximum(
    curves: Sequence[np.ndarray], replicas: Sequence[int], rows: int, stated: Sequence[int]
) -> tuple[int, ...] | None:
    """Rows of each replica by group that sum up to ``rows``, with which the slowest is fastest.

    ``curves``: by group the time of 0, 1, 2... rows; ``stated``: rows that are given, or 0. Exact,
    by dynamic programming over groups. None: no such rows.
    """
    best = np.full(rows + 1, np.inf)  # least time of the slowest group so far, by rows dealt
    best[0] = 0.0
    choices = []  # by group, its rows of a replica by rows dealt to it and groups before
    for curve, n, fixed in zip(curves, replicas, stated, strict=True):
        after, chosen_rows = np.full(rows + 1, np.inf), np.zeros(rows + 1, dtype=int)
        for b in [fixed] if fixed else range(1, len(curve)):
            if b < len(curve) and b * n <= rows:
                us = np.maximum(best[: rows + 1 - b * n], curve[b])
                better = us < after[b * n :]
                after[b * n :][better], chosen_rows[b * n :][better] = us[better], b
        best = after
        choices.append(chosen_rows)
    if not np.isfinite(best[rows]):
        return None
    dealt = list[int]()
    for chosen_rows, n in zip(reversed(choices), reversed(replicas), strict=True):
        dealt.append(int(chosen_rows[rows]))
        rows -= n * dealt[-1]
    return tuple(reversed(dealt))


def _descend(start: T, others: Callable[[T], Iterator[T]], cost: Callable[[T], float]) -> T:
    """Local search: go to the best of ``others`` of the current value until none costs less."""
    while True:
        best = min(others(start), key=cost, default=start)
        if cost(best) >= cost(start):
            return start
        start = best


def _side_by_side(job: Job, plan: ParallelPlan, split: Sequence[int]) -> Outcome:
    """The mean step of all ``rounds``; memory is that of the fullest group, whoever takes part."""
    all_groups = range(len(split))
    outcomes = [
        (_evaluated(job, replicas(job, plan, split, chosen, away)), share)
        for share, chosen, away in rounds(job, plan)
    ]
    if len(outcomes) == 1:
        return outcomes[0][0]
    whole = _evaluated(job, replicas(job, plan, split, all_groups))
    facts = {name: getattr(whole, name) for name in ("memory", "slowest", "fullest")}
    return replace(mean_of(outcomes), **facts)


def mean_of(outcomes: Sequence[tuple[Outcome, float]]) -> Outcome:
    """The mean of iterations, each with its weight; memory and tasks are those of the first."""
    first, tally = outcomes[0][0], Tally(outcomes[0][0].tally.on_cpu)
    by_name_us = AssumedTime()
    for outcome, share in outcomes:
        tally.add_all(outcome.tally, share)
        by_name_us.add_all(AssumedTime(0.0, outcome.assumed_by_us), share)
    names = [n for n, value in vars(first).items() if isinstance(value, float)]
    mean = {n: sum(share * getattr(outcome, n) for outcome, share in outcomes) for n in names}
    return replace(first, tally=tally, assumed_by_us=by_name_us.by_name_us, **mean)


def _evaluated(job: Job, ranks: Sequence[Rank]) -> Outcome:
    """Simulate a step of these ranks; on one CPU all share its cores."""
    if job.joined:
        return evaluate_ranks(ranks, job.optimizer)
    cores = ranks[0].book.gpu.sm_count
    cores_used = [rank.kin * rank.book.threads / cores for rank in ranks]
    # a loop over threads ends with its slowest one: that on the core that has most threads
    crowding = max(1.0, ceil(sum(cores_used)) / max(1.0, *cores_used))
    return evaluate_ranks(ranks, job.optimizer, crowding)


def _split_layers(job: Job, plan: ParallelPlan) -> Forecast:
    """Find how many layers each pipeline stage gets, where stages have unlike GPUs.

    From balanced times on, single layers move to the next stage or back while that is faster.
    """
    ranks_per_stage = plan.world_size // plan.pp
    groups = [g for g in job.cluster.groups for _ in range(g.count // ranks_per_stage)]
    if job.samples % plan.dp:
        raise ValueError(f"plan {str(plan)!r}: dp does not divide {job.samples} samples")
    rows, _ = micro_batch(plan, job.samples // plan.dp, job.seq)

    @cache
    def simulated(split: ParallelPlan) -> Outcome:
        return evaluate_ranks(stages(job, split, groups, rows), job.optimizer)

    def others(split: ParallelPlan) -> Iterator[ParallelPlan]:
        sizes = [int(n) for n in split.layers.split("+")]
        for a, b in permutations(range(len(sizes)), 2):
            moved = list(sizes)
            moved[a], moved[b] = sizes[a] - 1, sizes[b] + 1
            if abs(a - b) == 1 and moved[a]:
                yield replace(split, layers="+".join(map(str, moved)))

    best = plan
    if not (plan.layers or plan.first or plan.last):
        ranks = stages(job, plan, groups, rows)
        pieces = [ranks[c % plan.pp].model.layers for c in range(plan.pp * plan.virtual)]
        start = balanced(pieces, plan)
        best = _descend(start, others, lambda split: simulated(split).iteration_us)
    even = replace(plan, layers="", first=0, last=0)
    sizes = best.layers.split("+") if best.layers else []
    shares = [
        {"layers": "+".join(n for i, n in enumerate(sizes) if groups[i % plan.pp] == group)}
        for group in job.cluster.groups
    ]
    return report_job(job, best, simulated(best), groups, shares, simulated(even).iteration_us)
