"""A rank's step of a plan whose tables are spread over ranks, or lie outside of its GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from itercast.capture.opcall import ITEMSIZE_BYTES, OpCall, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import GREEDY
from itercast.capture.step import update_of
from itercast.compose.graph.codecs import Codec
from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.graph.rewrite import COLLECTIVE, StepBuilder, fresh_storages
from itercast.compose.parallel.placement import Cluster
from itercast.compose.pricing.price_book import PriceBook
from itercast.extras.recommenders.sharded_model import state_per_weight
from itercast.extras.recommenders.tables.batched_tables import BatchedStep, as_stored
from itercast.extras.recommenders.tables.captured import captured_tables
from itercast.extras.recommenders.tables.fetched_rows import with_frozen_tables_in
from itercast.extras.recommenders.tables.placement import (
    check_sharding,
    from_torchrec,
    memory_bytes,
)
from itercast.extras.recommenders.tables.rank_step import RankStep, rank_step
from itercast.extras.recommenders.tables.shard_times import ShardTimes, table_software

VECTORS = ("send vectors", "send gradients")  # exchanges of sharded tables, of pooled vectors


def tables_elsewhere(
    capture: StepCapture, plan: ParallelPlan, book: PriceBook, cluster: Cluster
) -> tuple[StepCapture, ParallelPlan, Mapping[str, int]]:
    """One rank's step, the rest of the plan, and bytes that a rank holds beside the step's.

    The rank is the one that spends most on its shards. Without ``shard`` the frozen tables, which
    are features of vertices, lie where ``tables`` says.
    """
    if not plan.shard:
        step, added_bytes = with_frozen_tables_in(capture, plan.tables, plan.cached)
        return step, replace(plan, tables="", cached=0.0), added_bytes
    sharded = slowest_rank(capture, plan, book, cluster)
    rest = replace(plan, shard="", shard_group=0, compress_shard="", local=0, tables="", cached=0.0)
    return sharded.step, rest, sharded.added_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRank:
    """The step of the rank that spends most on its shards, and extra bytes of the fullest rank."""

    step: StepCapture
    added_bytes: Mapping[str, int]
    outside: bool = False  # whether tables lie in other memory than the GPU's


def slowest_rank(
    capture: StepCapture, plan: ParallelPlan, book: PriceBook, cluster: Cluster
) -> ShardedRank:
    """The slowest rank of a plan with ``shard``; ValueError where it does not fit the tables."""
    text = None if plan.shard == GREEDY else _text(plan)
    tier = (plan.tables, plan.cached) if plan.tables else None
    per_node, rate = cluster.groups["tables"].per_node, cluster.slowest_bytes_per_s("tables")
    try:
        ranks = plan.table_ranks
        how = plan.compress_shard, plan.microbatches, plan.tp, ranks
        found = _slowest_rank(capture, text, tier, *how, per_node, rate, book)
        if plan.table_ranks < plan.stage_ranks and found.outside:
            raise ValueError("copies of tables outside HBM are not averaged: shard without a group")
        return found
    except ValueError as exc:
        raise ValueError(f"plan {str(plan)!r}: {exc}") from None


def _text(plan: ParallelPlan) -> str:
    try:
        return Path(plan.shard).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        reason = " ".join(str(exc).split())[:120]
        raise ValueError(f"plan {str(plan)!r}: shard is {GREEDY} or a file: {reason}") from None


@cached_by_identity
def _slowest_rank(
    capture: StepCapture,
    text: str | None,
    tier: tuple[str, float] | None,
    codec: str,
    micro: int,
    alike: int,
    ranks: int,
    per_node: int,
    rate: float,
    book: PriceBook,
) -> ShardedRank:
    """The slowest rank under a sharding: ``text`` in torchrec's form, or greedy if it is None.

    ``rate``: bytes/s of a rank's slowest link to others; ``tier``: where all tables lie; ``codec``:
    how vectors travel, which changes no greedy sharding; ``alike``: see ``Lookup``.
    """
    software = table_software(book)
    tables = as_stored(captured_tables(capture, alike), software)
    if not tables:
        raise ValueError("shard spreads embedding tables, and the model has none")
    optimizer = update_of(capture.optimizer)
    state = state_per_weight(optimizer)
    times = ShardTimes(tables, optimizer, ranks, per_node, rate, book)
    every = [t.table for t in tables]
    sharding = times.greedy(state) if text is None else from_torchrec(text, every)
    check_sharding(sharding, every, ranks, per_node)
    if tier is not None:  # copies stay in the GPU's own memory
        sharding = tuple(
            p if p.kind == "data_parallel" else replace(p, tier=tier[0], cached=tier[1])
            for p in sharding
        )
    rank = times.slowest(sharding)
    kind = BatchedStep if software.batched else RankStep
    pairs = zip(tables, sharding, strict=True)
    spread = [(t.table, p) for t, p in pairs if kind.batched or p.kind != "data_parallel"]
    listed, placed = [t for t, _ in spread], [p for _, p in spread]
    all_cached = [replace(p, cached=1.0) for p in placed]  # as if GPUs had room for whole tables
    weights, whole = (memory_bytes(s, listed, 0.0, ranks, per_node) for s in (placed, all_cached))
    split = (sharding, rank, ranks, per_node)
    step = rank_step(capture, tables, *split, on_cpu=book.gpu.kind == "cpu", kind=kind, micro=micro)
    return ShardedRank(
        step=compressed_vectors(step, Codec.of(codec)),
        added_bytes={
            "parameters": max(weights) - whole[rank],
            "optimizer": round(state * max(weights)),
        },
        outside=weights != whole,
    )


def compressed_vectors(step: StepCapture, codec: Codec | None) -> StepCapture:
    """The step of a rank with sharded tables whose pooled vectors and gradients travel as codes.

    They are encoded when they are sent and decoded before they are read; what ran beside the
    exchange still does.
    """
    of_vectors = [c for c in step.calls if c.op == COLLECTIVE and c.module in VECTORS]
    if codec is None or not of_vectors:
        return step
    dtype = of_vectors[0].outputs[0].dtype
    made, ids = StepBuilder(step), fresh_storages(step)
    waiting: dict[int, OpCall] = {}  # by storage that is received, what decodes it
    for i, call in enumerate(step.calls):
        for decode in [d for s, d in waiting.items() if s in {t.storage for t in call.tensors()}]:
            made.calls.append(replace(decode, phase=call.phase))
            waiting = {s: d for s, d in waiting.items() if d is not decode}
        if call not in of_vectors:
            made.add(i, call)
            continue
        numbers = call.args[0].nbytes // ITEMSIZE_BYTES[dtype]
        whole = replace(call.args[0], shape=(numbers,), stride=(), dtype=dtype)
        codes, arrived = codec.coded(whole, next(ids)), codec.coded(whole, next(ids))
        made.calls.append(replace(codec.encode(whole, codes, call.phase), module=call.module))
        made.add(i, replace(call, args=(codes,), outputs=(arrived,)))
        decode = codec.decode(arrived, whole, call.phase)
        decode = replace(decode, outputs=call.outputs, module=call.module)
        waiting |= {t.storage: decode for t in call.outputs}
    return made.step()
