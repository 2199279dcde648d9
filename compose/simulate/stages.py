"""Splits a model's layers over pipeline stages, and deals them to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product, takewhile
from typing import TypeVar

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import V_SHAPED
from itercast.compose.pricing.layer_prices import PricedLayer, PricedModel
from itercast.compose.pricing.rank_graph import until_read
from itercast.compose.simulate.pipeline import chunks_of_rank
from itercast.compose.simulate.rank import Rank

T = TypeVar("T")
Costs = Sequence[Sequence[float]]  # for each chunk the time of each layer, if the chunk has it


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive layers that a pipeline stage, or one of its virtual stages, runs, with counts."""

    runs: tuple[tuple[PricedLayer, int], ...]

    @property
    def key(self) -> tuple[tuple[int, int], ...]:
        """Identity of the layers: chunks with equal keys take the same time."""
        return tuple((id(layer), count) for layer, count in self.runs)

    @property
    def layers(self) -> tuple[PricedLayer, ...]:
        """The layers, equal ones one by one."""
        return tuple(layer for layer, count in self.runs for _ in range(count))

    def is_detached(self, capture: StepCapture) -> bool:
        """Whether backward reads no tensor that later layers' backward makes, except scalars."""
        start, end = self.runs[-1][0].layer.backward
        later = [c for c in capture.calls[:start] if c.phase == "backward"]
        written = {t.storage for c in later for t in c.outputs if t.numel > 1}
        read = {t.storage for c in capture.calls[start:end] for t in c.tensors()}
        return bool(later) and written.isdisjoint(read)


def chunks_of(rank: Rank) -> list[Chunk]:
    """The model's chunks of layers; plans with as many chunks share them.

    The last chunk has copies of weights that are tied to the first chunk's, if on another rank.
    """

    def cut_into_chunks() -> list[Chunk]:
        chunks = partition(rank.model.layers, rank.plan, _fewest_on_first_stage(rank.model))
        first_and_last_on_one_rank = rank.plan.pp == 1 or rank.plan.schedule in V_SHAPED
        if first_and_last_on_one_rank:
            return chunks
        return [*chunks[:-1], _with_tied(chunks[-1], rank.model)]

    return rank.model.once(("chunks", *layout(rank.plan)), cut_into_chunks)


def _fewest_on_first_stage(model: PricedModel) -> int:
    """How many layers the first stage must have: up to those that read other ranks' tables.

    The messages of these lookups run from the start of forward until then.
    """
    calls = model.graph.capture.calls
    lookups = [i for i in model.graph.asked.messages if calls[i].kwargs["until_read"]]
    ends_of_lookups = [i + 1 + sum(1 for _ in until_read(i, calls)) for i in lookups]
    last_end = max((i for i in ends_of_lookups if calls[i].phase == "forward"), default=0)
    return 1 + sum(x.layer.count for x in model.layers if 0 < x.layer.forward[1] <= last_end)


def crossing_bytes(rank: Rank, chunk: Chunk) -> int:
    """Bytes of a micro-batch that all tp ranks together send from a chunk to the next one."""
    _, last_layer = rank.model.graph.before_fusion(chunk.runs[-1][0].layer)
    return max(1, last_layer.output_bytes + last_layer.passed_bytes)


def layout(plan: ParallelPlan) -> tuple[object, ...]:
    """What of a plan changes which layers a rank has."""
    return (plan.schedule in V_SHAPED, *plan.parts("stages"))


def dealt(plan: ParallelPlan, chunks: Sequence[T]) -> list[list[T]]:
    """For each rank of the pipeline, what belongs to its chunks."""
    ranks = (chunks_of_rank(plan.schedule, plan.pp, r, len(chunks)) for r in range(plan.pp))
    return [[chunks[c] for c in mine] for mine in ranks]


def stages_of(rank: Rank) -> list[Rank]:
    """One rank for each pipeline stage, with the layers of all virtual stages that it holds."""
    stages = []
    for mine in dealt(rank.plan, chunks_of(rank)):
        starts = tuple(accumulate(len(c.layers) for c in mine))[:-1]
        layers = tuple(x for c in mine for x in c.layers)
        stages.append(replace(rank, layers=layers, starts=starts))
    return stages


def partition(layers: Sequence[PricedLayer], plan: ParallelPlan, fewest: int = 1) -> list[Chunk]:
    """Cuts the model into pp * virtual chunks of consecutive layers; ValueError for too few layers.

    A model of equal numbered layers, such as transformer blocks: these are spread evenly, and the
    first chunks get one more where they do not divide. What precedes and follows them (embedding,
    head) joins the first and the last chunk; it counts as layers only where there are fewer
    numbered layers than chunks. Other models are cut so that the slowest chunk is as fast as
    possible. The first chunk has ``fewest`` layers or more.
    """
    chunks = plan.pp * plan.virtual
    runs = [(x, x.layer.count) for x in layers]
    total = sum(n for _, n in runs)
    numbered = sum(n for x, n in runs if x.numbered)
    if fewest + chunks - 1 > total > chunks - 1:
        left = f"{total - fewest} of {total} layers are left"
        rule = f"{chunks} stages, {left} once the first has read its tables' vectors"
        raise ValueError(f"plan {str(plan)!r}: {rule}")
    if chunks == 1:
        return [Chunk(runs=tuple(runs))]
    if chunks > total:
        others = f", {total} parts with what comes before and after" if 0 < numbered < total else ""
        counted = f"the model has {numbered or total} layers{others}"
        raise ValueError(f"plan {str(plan)!r}: {chunks} stages, {counted}")
    if _are_equal(layers):
        sizes = _sizes(plan, numbered if chunks <= numbered else total)
        ends = _count_cuts(runs, sizes, whole=chunks > numbered)
    elif plan.first or plan.last:
        raise ValueError(f"plan {str(plan)!r}: first and last count equal layers; there are none")
    elif plan.layers:
        ends = _count_cuts(runs, _sizes(plan, total), whole=True)
    else:
        us = _unit_costs(layers)
        costs = [[sum(us[:fewest]), *us[fewest:]]] * chunks
        ends = [end + fewest - 1 for end in _cost_cuts(costs)]
    if ends[0] < fewest:
        rule = f"the first stage reads its tables' vectors in layer {fewest}, it has {ends[0]}"
        raise ValueError(f"plan {str(plan)!r}: {rule}")
    return [Chunk(runs=_slice(runs, a, b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def balanced(models: Sequence[Sequence[PricedLayer]], plan: ParallelPlan) -> ParallelPlan:
    """The plan with its layers dealt to stages so that the slowest stage takes the least time.

    ``models``: of each stage all layers of the model, priced on the stage's device. What precedes
    and follows equal layers is part of the first and the last one.
    """
    costs = [_unit_costs(layers) for layers in models]
    if _are_equal(models[0]):
        numbered = [i for i, x in enumerate(_flat(models[0])) if x.numbered]
        first, last = numbered[0], numbered[-1]
        if len(numbered) >= len(models):  # what comes before and after is part of these
            costs = [[sum(us[: first + 1]), *us[first + 1 : last], sum(us[last:])] for us in costs]
    if len(costs) > len(costs[0]):
        raise ValueError(f"plan {str(plan)!r}: {len(costs)} stages of {len(costs[0])} layers")
    ends = _cost_cuts(costs)
    sizes = [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return replace(plan, layers="+".join(map(str, sizes)))


def _flat(layers: Sequence[PricedLayer]) -> list[PricedLayer]:
    """The layers, equal ones one by one."""
    return [x for x in layers for _ in range(x.layer.count)]


def _unit_costs(layers: Sequence[PricedLayer]) -> list[float]:
    """Time of a micro-batch by layer."""
    return [x.forward_work.alone_us + x.backward_work.alone_us for x in _flat(layers)]


def uneven(layers: Sequence[PricedLayer], plan: ParallelPlan) -> ParallelPlan | None:
    """The plan with the best numbers of layers on the first and on the last pipeline stage.

    The slowest stage is then fastest, as the embedding is part of the first stage and the head of
    the last. None if an even split is as good, or if layers are not equal.
    """
    numbered = [x for x in layers if x.numbered]
    total, pp = sum(x.layer.count for x in numbered), plan.pp
    if pp == 1 or plan.virtual > 1 or total < 2 * pp or not _are_equal(layers):
        return None
    us = [(x.forward_work.alone_us + x.backward_work.alone_us) * x.layer.count for x in layers]
    places = [i for i, x in enumerate(layers) if x.numbered]
    block_us = sum(us[i] for i in places) / total
    ahead_us, behind_us = sum(us[: places[0]]), sum(us[places[-1] + 1 :])

    def slowest_us(first: int, last: int) -> float:
        inner = -(-(total - first - last) // (pp - 2)) if pp > 2 else 0
        return max(ahead_us + first * block_us, inner * block_us, behind_us + last * block_us)

    most = -(-total // pp) + 1  # on the first stage, and on the last one of three or more
    if pp == 2:
        splits = [(first, total - first) for first in range(1, min(most, total - 1) + 1)]
    else:  # each inner stage has a layer
        pairs = product(range(1, most + 1), repeat=2)
        splits = [(first, last) for first, last in pairs if first + last + pp - 2 <= total]
    even = _sizes(plan, total)
    usual = (even[0], even[-1])

    def badness(split: tuple[int, int]) -> tuple[float, int]:
        return slowest_us(*split), abs(split[0] - usual[0]) + abs(split[1] - usual[1])

    best = min(splits, key=badness, default=usual)
    if slowest_us(*best) >= slowest_us(*usual):
        return None
    return replace(plan, first=best[0], last=best[1])


def _are_equal(layers: Sequence[PricedLayer]) -> bool:
    """Whether all numbered layers are in one list and have parameters of one or two kinds."""
    numbered = [x.layer for x in layers if x.numbered]
    lists = {x.name.rpartition(".")[0] for x in numbered}
    kinds = {tuple(p.shape for p in x.parameters) for x in numbered}
    return len(lists) == 1 and len(kinds) <= 2


def _with_tied(chunk: Chunk, model: PricedModel) -> Chunk:
    """The last chunk with its own copy of the weights that it ties to the first layer's.

    Gradients of the copy are ready at the end of the chunk's backward.
    """
    tied = model.graph.tied
    if not tied:
        return chunk
    first, (last, count) = model.layers[0], chunk.runs[-1]
    at = [first.layer.parameters.index(p) for p in tied]
    ready = max(0, len(last.backward) - 1)
    copies = tuple(replace(p, ready_after=ready) if p.ready_after >= 0 else p for p in tied)
    own = replace(
        last,
        layer=replace(last.layer, parameters=(*last.layer.parameters, *copies)),
        accumulate=(*last.accumulate, *(first.accumulate[i] for i in at)),
        into_bucket=(*last.into_bucket, *(first.into_bucket[i] for i in at)),
        out_of_bucket=(*last.out_of_bucket, *(first.out_of_bucket[i] for i in at)),
    )
    before = [(last, count - 1)] if count > 1 else []
    return Chunk(runs=(*chunk.runs[:-1], *before, (own, 1)))


def _sizes(plan: ParallelPlan, counted: int) -> list[int]:
    """Layers of each chunk: as many as the plan states on the first and last, else evenly."""
    chunks = plan.pp * plan.virtual
    if plan.layers:
        sizes = [int(n) for n in plan.layers.split("+")]
        if sum(sizes) != counted:
            wrong, stated_plan = f"layers={plan.layers} are {sum(sizes)}", f"plan {str(plan)!r}"
            raise ValueError(f"{stated_plan}: {wrong} layers, the model has {counted}")
        return sizes
    stated = [n for n in (plan.first, plan.last) if n]
    others, left = chunks - len(stated), counted - sum(stated)
    if left < others or (left and not others):
        raise ValueError(
            f"plan {str(plan)!r}: {counted} layers leave {left} for {others} other stages"
        )
    even = [left // others + (i < left % others) for i in range(others)]
    return [*([plan.first] if plan.first else []), *even, *([plan.last] if plan.last else [])]


def _count_cuts(
    runs: Sequence[tuple[PricedLayer, int]], sizes: Sequence[int], *, whole: bool
) -> list[int]:
    """Returns where chunks of these numbers of layers end; ``whole``: all layers are counted."""
    total = sum(n for _, n in runs)
    ahead = [n for _, n in takewhile(lambda run: not run[0].numbered, runs)]
    ends = list(accumulate(sizes, initial=0 if whole else sum(ahead)))[1:]
    return [*ends[:-1], total]


def _cost_cuts(costs: Costs) -> list[int]:
    """Returns where chunks end so that the slowest is fastest, none empty; by bisection."""
    low, high = min(map(max, costs)), max(map(sum, costs))
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _pack(costs, middle) else (middle, high)
    return _pack(costs, high)


def _pack(costs: Costs, limit: float) -> list[int]:
    """Ends of chunks filled up to ``limit``, none empty; [] where that needs more chunks."""
    ends, chunks, layers = list[int](), len(costs), len(costs[0])
    for c, layer_costs in enumerate(costs):
        start = ends[-1] if ends else 0
        stop, cost = start + 1, layer_costs[start]
        last = layers - (chunks - c - 1)  # later chunks have a layer each
        while stop < last and cost + layer_costs[stop] <= limit:
            cost += layer_costs[stop]
            stop += 1
        if cost > limit:
            return []
        ends.append(stop)
    return ends if ends[-1] == layers else []


def _slice(
    runs: Sequence[tuple[PricedLayer, int]], start: int, stop: int
) -> tuple[tuple[PricedLayer, int], ...]:
    """Layers ``start`` to ``stop`` of a model, with the number of equal ones in a row."""
    within, begin = [], 0
    for layer, count in runs:
        overlap = min(stop, begin + count) - max(start, begin)
        if overlap > 0:
            within.append((layer, overlap))
        begin += count
    return tuple(within)
