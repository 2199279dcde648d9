"""What each strategy of data parallelism adds to a rank's step to keep replicas equal.

- DDP, as a profile of torch 2.13 shows it: before forward running statistics are broadcast, a
  message per dtype, and copied back. Each gradient is multiplied into its bucket as soon as it is
  ready, a full bucket is all-reduced behind backward; then each is awaited and its gradients are
  copied back. Memory: a second copy of the gradients.
- zero=1, 2, 3: FSDP2, see ``fsdp``. An all_gather before each layer, a reduce_scatter
  after it (with no_sync in the last micro-batch alone), a copy for each, the optimizer on 1/n.
  Frozen parameters are sharded and gathered from zero=2 on. Memory: optimizer state / n; from 2 on
  gradients / n, but in a pipeline and with no_sync; with 3 two whole layers at a time.
- gossip (Bluefog, arXiv:2111.04287): parameters are averaged with neighbours, from the start of
  forward on; the optimizer waits for the average. Replicas of one node are averaged first
  (reduce_scatter, all_gather after it), so that each sends its part to the next node's. With a
  probability (EventGraD, arXiv:2103.07454) a parameter is sent when its norm has changed enough:
  norms are computed in each step, and a step has the expected share of messages and copies.
- local (local SGD, DiLoCo): nothing is sent in backward. Every K steps, after the optimizer,
  parameters are packed into buckets, all-reduced and unpacked, which nothing else overlaps; a step
  has 1/K of these times. With hsdp, shards are averaged among the groups as they lie. With outer
  (DiLoCo, arXiv:2311.08105) changes since the last average are averaged, and SGD with Nesterov's
  momentum moves a copy of the parameters by them. Memory: that copy, and the momentum.
- compress: a share of the gradients' bytes, fp32 gradients in fp16 where it is at most one half; a
  pass to pack and one to unpack each. Other codecs encode and decode each bucket (``codecs``).
- coconet (ASPLOS'22): split: all_reduce as reduce_scatter and all_gather. reorder: the optimizer on
  1/n between the two. fuse: reduce_scatter, optimizer and all_gather of a bucket are one kernel on
  the tensors where they lie, so that nothing is copied into buckets, nor updated after backward.
  overlap:C: a message may start when 1/C of the op that computes it is done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import ITEMSIZE_BYTES, OpCall, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import added_keys
from itercast.compose.graph.codecs import Codec
from itercast.compose.parallel.placement import Cluster
from itercast.compose.pricing.collectives import Message
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.microbench.hardware.stack import Stack
from itercast.microbench.ops.step.alpha_beta import EXCHANGE

PRECISE = "fp32"
BUCKET_BYTES = 25 * 2**20  # DDP's default
WHOLE_MODEL = 2**62  # bytes
FIRST_BUCKET_BYTES = 2**20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
# Compression ratio at which fp32 gradients are sent in fp16, at most.
FP16_RATIO: float = assumed(__file__, "fp16_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How replicas exchange gradients and weights: messages, when, what is sharded and offloaded.

    It has all that a plan says of this, but layers and groups of ranks: plans with equal strategies
    share what is simulated.
    """

    reduce: tuple[str, ...] = ()  # after a bucket is full
    after_update: tuple[str, ...] = ()  # once the optimizer is done
    copies_in: int = 0  # passes over each gradient into its bucket
    copies_out: int = 0
    every_micro: bool = False  # gather parameters in each micro-batch, not in the first alone
    scatters_each: bool = False  # scatter gradients after each micro-batch, not the last alone
    by_layer: bool = False  # gather parameters before, scatter gradients after each layer
    regather: bool = False  # in backward too
    whole_after_backward: bool = False  # what torch's pipelines gather stays whole after backward
    frozen_whole: bool = False  # only parameters with a gradient are sharded
    share_update: bool = False
    share_gradients: bool = False
    fused_update: bool = False
    chunks: int = 1
    buckets: bool = False  # a second copy of the gradients
    broadcast: bool = False  # running statistics before forward
    gossip: bool = False  # parameters are averaged with a few replicas, beside forward
    every: int = 0  # steps between averages of parameters; 0: gradients are reduced in each
    sends: float = 1.0  # probability of a message by gossip
    outer: bool = False  # an optimizer's step follows each average
    codec: Codec | None = None  # of gradients
    cyclic: bool = False  # replicas are staggered (``replicas``)
    expert_replicas: int = 1  # ranks that have the same experts, where ep spreads them
    offload: str = ""  # optimizer, parameters, activations, joined by +
    bucket_bytes: int = 0  # of DDP; 0: 25 MiB, the first of a dtype 1 MiB
    in_fp32: bool = False  # gradients are reduced in fp32, whatever they are computed in
    scatter: str = "reduce_scatter"  # the message in which a rank gets its sums of gradients

    @property
    def handed_on(self) -> bool:
        """Whether staggered replicas hold one stage at a time."""
        return self.cyclic and self.share_update

    @property
    def late(self) -> bool:
        """Whether all gradients are sent at once after backward, all sharded weights before it."""
        return self.bucket_bytes == WHOLE_MODEL

    def of_gradients(self, message: Message) -> Message:
        """The message, in fp32 if gradients are reduced in fp32."""
        if not self.in_fp32:
            return message
        wider = ITEMSIZE_BYTES[PRECISE] / ITEMSIZE_BYTES[message.dtype]
        return replace(message, message_bytes=round(wider * message.message_bytes), dtype=PRECISE)


def by_software(strategy: Strategy, plan: ParallelPlan, stack: Stack, dtype: str) -> Strategy:
    """The strategy of a plan as a software stack runs it; gradients are of ``dtype``.

    Gradients are reduced in fp32 under mixed precision with ``zero`` (DDP's are fp32 anyway), and
    if the stack sums them in an fp32 buffer, unless plan or stack halve them. Under
    ``reduces_late`` DDP has one bucket of each dtype, full when backward is done, and ZeRO 1 and 2
    gather the trained weights of the whole model once a step.
    """
    half = bool(plan.compress) or stack.reduces_half
    buffer = stack.held.get(dtype)
    summed = buffer is not None and buffer.gradient >= ITEMSIZE_BYTES[PRECISE]
    strategy = replace(strategy, in_fp32=not half and (bool(plan.amp and plan.zero) or summed))
    if plan.zero not in stack.reduces_late or not (strategy.reduce or strategy.by_layer):
        return strategy
    packed = plan.amp and stack.reduces_half and strategy.codec is None
    codec = Codec.of(str(FP16_RATIO)) if packed else strategy.codec
    late = replace(strategy, bucket_bytes=WHOLE_MODEL, codec=codec, every_micro=False)
    scatter = "all_reduce" if stack.all_reduces else strategy.scatter
    return replace(late, frozen_whole=strategy.by_layer, scatter=scatter)


@lru_cache(maxsize=4096)
def strategy_of(plan: ParallelPlan) -> Strategy:
    """Returns how the replicas of a plan are kept equal: DDP, ZeRO, gossip..."""
    replicas = Strategy() if plan.dp * plan.cp == 1 else _replicas(plan)
    alike = plan.expert_replicas if plan.ep > 1 else 1
    codec = Codec.of(plan.compress)
    if codec is not None and not codec.summable:
        replicas = replace(replicas, reduce=("all_to_all", "all_gather"))
    replicas = replace(replicas, codec=codec, expert_replicas=alike, offload=plan.offload)
    for name, value in plan.more:
        replicas = added_keys()[name].replicas(replicas, value)
    return replicas


def _replicas(plan: ParallelPlan) -> Strategy:
    """The strategy of several replicas, without codec, experts and offload."""
    codec = Codec.of(plan.compress)
    packing = int(codec is not None and codec.kind == "share")
    every = 0 if plan.shard else plan.local  # with shard, of tables
    if plan.cdp:
        whole = plan.zero == 0  # each replica holds the whole model
        return Strategy(
            buckets=whole, cyclic=True, share_update=not whole, share_gradients=not whole
        )
    if plan.zero:
        gathers_each = plan.zero > 1 and plan.pp == 1
        scatters_each = gathers_each and not plan.no_sync
        return Strategy(
            by_layer=True,
            regather=plan.zero == 3,
            whole_after_backward=plan.zero > 1 and plan.pp > 1,
            frozen_whole=plan.zero == 1,
            every_micro=plan.zero == 3 or gathers_each,
            scatters_each=scatters_each,
            share_update=True,
            share_gradients=scatters_each,
            every=every,
            outer=plan.outer,
        )
    if every:
        passes = 1 + packing
        return Strategy(every=every, outer=plan.outer, copies_in=passes, copies_out=passes)
    if plan.gossip:
        sent, passes = {"ring": 2, "exp2": 1}[plan.gossip], 1 + packing
        copies = Strategy(
            copies_in=passes, copies_out=passes, buckets=True, gossip=True, sends=plan.sends
        )
        return replace(copies, reduce=(EXCHANGE,) * sent)
    return _all_reduced(plan, packing)


def _all_reduced(plan: ParallelPlan, packing: int) -> Strategy:
    """DDP's all_reduce of buckets, broken up and moved as ``coconet`` says (arXiv 2105.05720).

    ``packing``: 1 if compressing is one more pass over each gradient, else 0.
    """
    split, reorder, fuse = (word in plan.coconet for word in ("split", "reorder", "fuse"))
    if fuse:  # packing is a pass of the same kernel
        return Strategy(
            reduce=("all_reduce",),
            share_update=True,
            fused_update=True,
            chunks=plan.chunks,
            broadcast=True,
        )
    parts = ("reduce_scatter", "all_gather") if split else ("all_reduce",)
    return Strategy(
        reduce=parts[:1] if reorder else parts,
        after_update=parts[1:] if reorder else (),
        copies_in=1 + packing,
        copies_out=packing if reorder else 1 + packing,
        share_update=reorder,
        chunks=plan.chunks,
        buckets=True,
        broadcast=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBucket:
    """A bucket of a rank's gradients over ``axis``.

    It is full after op ``offset`` of the backward of layer ``instance`` (in forward order).
    """

    instance: int
    offset: int
    nbytes: int
    dtype: str
    axis: str
    members: tuple[tuple[int, int], ...]  # (instance, parameter)

    def message(self, kind: str, strategy: Strategy) -> Message:
        """One collective over the bucket, as large as its codes where gradients are compressed."""
        ratio = strategy.codec.ratio(self.dtype) if strategy.codec else 1.0
        sent_bytes = max(1, round(self.nbytes * ratio))
        dtype = "fp16" if self.dtype == "fp32" and ratio <= FP16_RATIO else self.dtype
        return Message(kind=kind, axis=self.axis, message_bytes=sent_bytes, dtype=dtype)

    def coded(self, strategy: Strategy, cluster: Cluster) -> tuple[list[OpCall], list[OpCall]]:
        """The kernels that encode the bucket, and those that sum and decode what arrives."""
        codec = strategy.codec
        if codec is None or codec.kind == "share":  # which is packed gradient by gradient
            return [], []
        numel = self.nbytes // ITEMSIZE_BYTES[self.dtype]
        whole = TensorSpec(shape=(numel,), dtype=self.dtype, storage=-1)
        codes = codec.coded(whole, -2)
        rank_part = codec.coded(whole, -3, cluster.groups[self.axis].size)
        sums = [] if codec.summable else [codec.encode(codes, rank_part, "backward")]
        decode = codec.decode(codes, whole, "backward")
        return [codec.encode(whole, codes, "backward")], [*sums, decode]

    def messages(self, strategy: Strategy, cluster: Cluster) -> list[Message]:
        """Messages of a full bucket; gossip averages within a node first, then between nodes."""
        sent = [strategy.of_gradients(self.message(kind, strategy)) for kind in strategy.reduce]
        group = cluster.groups[self.axis]
        if not strategy.gossip or self.axis != "shard":
            return sent
        if group.size == group.per_node:
            return [replace(m, axis="intra_node") for m in sent]
        own_bytes = -(-sent[0].message_bytes // group.per_node)
        far = [replace(m, axis="inter_node", message_bytes=own_bytes) for m in sent]
        near = replace(sent[0], axis="near", kind="reduce_scatter")
        return [near, *far, replace(near, kind="all_gather")]


def fill_buckets(
    gradients: Iterable[tuple[K, int, T]], bucket_bytes: int = 0
) -> list[tuple[K, list[T]]]:
    """Buckets of gradients as DDP fills them, in the order in which they close.

    ``gradients`` are (key, bytes, gradient) as they become ready; a bucket holds one key, at least
    the dtype. It closes with the gradient that reaches its limit: ``bucket_bytes``, else 1 MiB for
    the first of a key, then 25 MiB. What stays open closes last.
    """
    open_: dict[K, list[T]] = {}
    filled_bytes: dict[K, int] = {}
    limit_bytes: dict[K, int] = {}
    closed: list[tuple[K, list[T]]] = []
    for key, nbytes, gradient in gradients:
        open_.setdefault(key, []).append(gradient)
        filled_bytes[key] = filled_bytes.get(key, 0) + nbytes
        if filled_bytes[key] >= limit_bytes.get(key, bucket_bytes or FIRST_BUCKET_BYTES):
            closed.append((key, open_.pop(key)))
            filled_bytes[key], limit_bytes[key] = 0, bucket_bytes or BUCKET_BYTES
    return [*closed, *open_.items()]


def layer_buckets(
    layers: Sequence[PricedLayer], strategy: Strategy, starts: Sequence[int] = ()
) -> list[LayerBucket]:
    """Buckets of a rank's layers in the order in which they fill.

    Experts have buckets of their own, or none where no other rank has them. So have the virtual
    stages that begin at the layers ``starts``: each is a module of its own.
    """
    closed = fill_buckets(_ready_gradients(layers, strategy, starts), strategy.bucket_bytes)
    buckets = [_layer_bucket(dtype, axis, members) for (dtype, axis, _), members in closed]
    return sorted(buckets, key=lambda b: (-b.instance, b.offset))


def reductions(
    layers: Sequence[PricedLayer], strategy: Strategy, cluster: Cluster, starts: Sequence[int]
) -> list[Message]:
    """Messages between replicas of these layers in backward: one per bucket and kind."""
    buckets = layer_buckets(layers, strategy, starts) if strategy.reduce else []
    return [m for b in buckets for m in b.messages(strategy, cluster)]


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A parameter's gradient, ready after op ``offset`` of the backward of its layer instance."""

    instance: int
    parameter: int
    offset: int
    nbytes: int


def _ready_gradients(
    layers: Sequence[PricedLayer], strategy: Strategy, starts: Sequence[int]
) -> Iterator[tuple[tuple[str, str, int], int, _Gradient]]:
    """Yield bucket key, bytes and gradient in the order in which backward computes them.

    A key is (dtype, "expert" or "shard", virtual stage); ``starts`` are the stages' first layers.
    Frozen parameters, and experts that no other rank has, are left out.
    """
    for instance in range(len(layers) - 1, -1, -1):
        parameters = layers[instance].layer.parameters
        # autograd delivers the gradient of a bias before that of its weight, still to transpose
        keys = [(p.ready_after, len(p.shape) == 2) for p in parameters]
        order = sorted(range(len(parameters)), key=keys.__getitem__)
        for at in order:
            p = parameters[at]
            if p.ready_after >= 0 and not (p.spread and strategy.expert_replicas == 1):
                axis = "expert" if p.spread else "shard"
                key = (p.dtype, axis, bisect_right(starts, instance))
                yield key, p.nbytes, _Gradient(instance, at, p.ready_after, p.nbytes)


def _layer_bucket(dtype: str, axis: str, members: Sequence[_Gradient]) -> LayerBucket:
    """The bucket of these gradients, full once the last of them is ready."""
    return LayerBucket(
        instance=members[-1].instance,
        offset=members[-1].offset,
        nbytes=sum(g.nbytes for g in members),
        dtype=dtype,
        axis=axis,
        members=tuple((g.instance, g.parameter) for g in members),
    )
