"""Peak memory of the ranks of a plan: what micro-batches in flight hold, and messages between them.

Torch's pipelines (``torch/distributed/pipelining/stage.py``) allocate memory for the messages of
all micro-batches beforehand, and hold what a stage returned for a micro-batch until its backward.
For the last stage that is what the loss reads, such as logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from itercast.compose.graph.lifetimes import bytes_for_loss
from itercast.compose.pricing.optimizer import state_copies
from itercast.compose.simulate.fsdp import shard_bytes
from itercast.compose.simulate.memory.rank_memory import Sizes, held_by_software, rank_memory
from itercast.compose.simulate.pipeline import in_flight
from itercast.compose.simulate.rank import Rank
from itercast.compose.simulate.stages import Chunk, chunks_of, crossing_bytes, dealt, layout
from itercast.microbench.hardware.stack import stack_of_row


class Stage(NamedTuple):
    """The sizes of a rank's layers, by chunk the bytes saved for backward, and bytes of messages.

    ``received``: those of a micro-batch that come to its chunks, forward and backward;
    ``returned``: by chunk, what the loss reads and backward does not.
    """

    sizes: Sizes
    saved: list[int]
    received: int
    returned: list[int]


class Moment(NamedTuple):
    """A moment of large memory: bytes of other micro-batches (``others``), messages and results.

    ``first``: before the end of its first backward, which makes the gradients.
    """

    sizes: Sizes
    others: int
    passed: int
    first: bool


def memory(rank: Rank, optimizer: str) -> dict[str, int]:
    """Peak memory of the fullest rank, by purpose: of ranks with equal layers one is enough."""
    moments = [moment for stage in stages_held(rank) for moment in stage]
    moments.sort(key=lambda moment: moment.others + moment.passed)
    most = {(id(moment.sizes), moment.first): moment for moment in moments}  # the largest come last
    return max((_memory(rank, optimizer, m) for m in most.values()), key=_total)


def stage_memory(rank: Rank, optimizer: str) -> list[dict[str, int]]:
    """Peak memory of each rank of a pipeline, by purpose; without a pipeline, of one rank."""
    return [
        max((_memory(rank, optimizer, moment) for moment in stage), key=_total)
        for stage in stages_held(rank)
    ]


def stages_held(rank: Rank) -> Iterator[list[Moment]]:
    """What each rank of a pipeline holds in its first backward, and in later ones."""
    plan = rank.plan
    for r, stage in enumerate(_held(rank)):
        counts = in_flight(plan.schedule, plan.pp, r, plan.microbatches, plan.virtual)
        moments = [
            _moment(stage, held, plan.microbatches, first=first)
            for held, first in zip(counts, (True, False), strict=True)
        ]
        yield moments if sum(counts[0]) > sum(counts[1]) else moments[1:]


def _moment(stage: Stage, held: Sequence[int], micro: int, *, first: bool) -> Moment:
    """The moment when a rank holds the activations of ``held`` micro-batches of each chunk."""
    others = sum((n - 1) * saved for n, saved in zip(held, stage.saved, strict=True))
    returned = sum(n * nbytes for n, nbytes in zip(held, stage.returned, strict=True))
    return Moment(stage.sizes, max(0, others), micro * stage.received + returned, first)


def _total(by_purpose: dict[str, int]) -> int:
    return sum(by_purpose.values())


def _memory(rank: Rank, optimizer: str, moment: Moment) -> dict[str, int]:
    """Peak bytes by purpose of a rank at a moment."""
    graph, copies_by_dtype = rank.model.graph, stack_of_row(rank.book.stack).held
    first = moment.sizes.runs[0][0]
    largest = max(graph.matrix_bytes, graph.table_bytes if rank.model.has_tables(first) else 0)
    facts = (graph.update_share, moment.others, largest, copies_by_dtype)
    made = rank.one_by_one or (rank.plan.microbatches > 1 and not moment.first)
    by_purpose = rank_memory(moment.sizes, rank.plan, optimizer, *facts, made=made)
    buffered, _ = held_by_software(moment.sizes, rank.plan, copies_by_dtype)
    by_purpose["activations"] += graph.input_bytes + (0 if buffered else moment.passed)
    added = rank.model.added_to(first)
    return {name: n + added.get(name, 0) for name, n in by_purpose.items()}


def _held(rank: Rank) -> list[Stage]:
    """For each rank of a pipeline: sizes of its layers, and bytes that a micro-batch adds."""

    def held() -> list[Stage]:
        chunks = chunks_of(rank)
        crossing = [crossing_bytes(rank, chunk) for chunk in chunks[:-1]]
        received = [a + b for a, b in zip([0, *crossing], [*crossing, 0], strict=True)]
        returned = [0] * len(crossing) + [bytes_for_loss(rank.model.graph.capture)]
        if len(chunks) == 1:
            returned = [0]
        each = list(zip(chunks, received, returned, strict=True))
        return [of_rank(*zip(*mine, strict=True)) for mine in dealt(rank.plan, each)]

    def of_rank(chunks: Sequence[Chunk], received: Sequence[int], returned: Sequence[int]) -> Stage:
        own = ("sizes", *(c.key for c in chunks))  # equal ones share their sizes
        sizes, saved = rank.model.once(own, partial(_sizes, chunks))
        return Stage(sizes, saved, sum(received), list(returned))

    return rank.model.once(("held", *layout(rank.plan)), held)


def _sizes(chunks: Sequence[Chunk]) -> tuple[Sizes, list[int]]:
    """Sizes of all layers of chunks, and by chunk what forward saves."""
    saved = [sum(x.saved_bytes * n for x, n in c.runs) for c in chunks]
    return Sizes.of([run for c in chunks for run in c.runs]), saved


def host_memory(rank: Rank, optimizer: str) -> int:
    """Bytes that the fullest rank of a plan offloads to host memory, at most at a time.

    With offload=parameters these are shards, their gradients and the optimizer's states; with
    activations, those of all micro-batches in flight. What is being copied is on the GPU as well.
    """
    plan, states, most = rank.plan, state_copies(optimizer), [0]
    moments = [moment for stage in stages_held(rank) for moment in stage] if plan.offload else []
    for moment in moments:
        sizes = moment.sizes
        held = held_by_software(sizes, plan, stack_of_row(rank.book.stack).held)[1]
        bytes_of = {
            "activations": moment.others + sum(x.saved_bytes * n for x, n in sizes.runs),
            "optimizer": sizes.held_by_rank(plan, optimizer, held)[1],
            "parameters": 0,
        }
        for x, n in sizes.runs:
            shard, gradients = shard_bytes(x.layer, plan.shards, fp32=plan.amp)
            bytes_of["parameters"] += n * (shard + (1 + states) * gradients)
        most.append(round(sum(bytes_of[name] for name in plan.offload.split("+"))))
    return max(most)
