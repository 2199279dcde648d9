"""How replicas stay equal: what each strategy of data parallelism adds, said once per strategy.

- DDP: an all_reduce per bucket behind backward, products into and copies out of the buckets.
  Memory: a second copy of the gradients.
- zero=1, 2, 3: FSDP2, see ``fsdp``. An all_gather before each layer, a reduce_scatter
  after it, a copy for each, the optimizer on 1/n. Memory: optimizer state / n; from 2 on
  gradients / n; with 3 two whole layers at a time.
- gossip: messages to neighbours and an average instead of the all_reduce (Bluefog).
- compress: gradients on the wire times the ratio, fp32 in fp16 where that makes at least half of
  it, and a pass to pack and unpack each.
- coconet (ASPLOS'22): split: all_reduce as reduce_scatter and all_gather. reorder: the optimizer on
  1/n between the two. fuse: its arithmetic as one pass. overlap:C: a message may start when 1/C of
  what makes it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compose.parallel.ep import is_expert
from compose.parallel.plan import ParallelPlan
from compose.pricing.collectives import Message
from compose.pricing.gradient_buckets import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES
from compose.pricing.layer_prices import PricedLayer

HALF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """What is sent per bucket, when, and what a rank keeps; shares divide over the replicas."""

    reduce: tuple[str, ...] = ()  # after a bucket is full
    after_update: tuple[str, ...] = ()  # once the optimizer is done
    copies_in: int = 0  # passes over each gradient into its bucket
    copies_out: int = 0
    every_micro: bool = False
    by_layer: bool = False  # gather parameters before, scatter gradients after each layer
    regather: bool = False  # in backward too
    share_update: bool = False
    share_gradients: bool = False
    fused_update: bool = False
    chunks: int = 1
    buckets: bool = False  # a second copy of the gradients
    broadcast: bool = False  # running statistics before forward


def strategy(plan: ParallelPlan) -> Strategy:
    """The plan's strategy."""
    packing = int(plan.compress < 1)
    if plan.dp * plan.cp == 1:
        return Strategy()
    if plan.cdp:
        return Strategy(buckets=True)  # compose.simulate.cyclic says what is sent
    if plan.zero:
        return Strategy(
            by_layer=True,
            regather=plan.zero == 3,
            every_micro=plan.zero > 1,
            share_update=True,
            share_gradients=plan.zero > 1,
        )
    if plan.gossip:
        sent = {"ring": 2, "exp2": 1}[plan.gossip]
        passes = 1 + packing
        return Strategy(
            reduce=("send_recv",) * sent, copies_in=passes, copies_out=passes, buckets=True
        )
    split, reorder = "split" in plan.coconet, "reorder" in plan.coconet
    parts = ("reduce_scatter", "all_gather") if split else ("all_reduce",)
    return Strategy(
        reduce=parts[:1] if reorder else parts,
        after_update=parts[1:] if reorder else (),
        copies_in=1 + packing,
        copies_out=packing if reorder else 1 + packing,
        share_update=reorder,
        fused_update="fuse" in plan.coconet,
        chunks=plan.overlap if "overlap" in plan.coconet else 1,
        buckets=True,
        broadcast=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A bucket: full after op ``offset`` of the backward of layer ``instance`` (forward order)."""

    instance: int
    offset: int
    nbytes: int
    dtype: str
    axis: str
    members: tuple[tuple[int, int], ...]  # (instance, parameter)

    def message(self, kind: str, plan: ParallelPlan) -> Message:
        """What is sent of it."""
        wire = max(1, round(self.nbytes * plan.compress))
        dtype = "fp16" if self.dtype == "fp32" and plan.compress <= HALF else self.dtype
        return Message(kind=kind, axis=self.axis, message_bytes=wire, dtype=dtype)


def fill_buckets(
    layers: Sequence[PricedLayer], plan: ParallelPlan, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> list[Filled]:
    """Buckets of a rank's layers in the order they fill; as ``ddp.buckets``, experts apart."""
    open_: dict[tuple[str, str], list[tuple[int, int, int, int]]] = {}
    filled: dict[tuple[str, str], int] = {}
    limit: dict[tuple[str, str], int] = {}
    found: list[Filled] = []
    for instance, at, offset, nbytes, key in _ready(layers, plan):
        open_.setdefault(key, []).append((instance, at, offset, nbytes))
        filled[key] = filled.get(key, 0) + nbytes
        if filled[key] >= limit.get(key, FIRST_BUCKET_BYTES):
            found.append(_closed(key, open_.pop(key)))
            filled[key], limit[key] = 0, bucket_bytes
    found += [_closed(key, members) for key, members in open_.items()]
    return sorted(found, key=lambda b: (-b.instance, b.offset))


def reductions(layers: Sequence[PricedLayer], plan: ParallelPlan) -> list[Message]:
    """What replicas of these layers send in backward, a message per bucket and kind."""
    kinds = strategy(plan).reduce
    return [b.message(k, plan) for b in fill_buckets(layers, plan) for k in kinds] if kinds else []


def _ready(
    layers: Sequence[PricedLayer], plan: ParallelPlan
) -> Iterator[tuple[int, int, int, int, tuple[str, str]]]:
    """(layer, parameter, offset in backward, bytes, (dtype, axis)) as gradients become ready."""
    for instance in range(len(layers) - 1, -1, -1):
        parameters = layers[instance].layer.parameters
        order = sorted(range(len(parameters)), key=lambda i: parameters[i].ready_after)
        for at in order:
            p = parameters[at]
            if p.ready_after >= 0:
                apart = plan.ep > 1 and is_expert(p)
                key = (p.dtype, "expert" if apart else "shard")
                yield instance, at, p.ready_after, p.nbytes, key


def _closed(key: tuple[str, str], members: Sequence[tuple[int, int, int, int]]) -> Filled:
    instance, _, offset, _ = members[-1]
    return Filled(
        instance=instance,
        offset=offset,
        nbytes=sum(m[3] for m in members),
        dtype=key[0],
        axis=key[1],
        members=tuple((m[0], m[1]) for m in members),
    )
