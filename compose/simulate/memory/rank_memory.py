"""Peak memory of a rank with these layers under a plan, by purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from itercast.capture.opcall import ITEMSIZE_BYTES
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import added_keys
from itercast.compose.graph.identity_cache import Once
from itercast.compose.graph.layers import Layer
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.pricing.optimizer import OUTER_COPIES, state_copies
from itercast.compose.simulate.data_parallel import Strategy, strategy_of
from itercast.microbench.hardware.stack import Held

PRECISE_BYTES = 4  # of fp32
STAGES_HANDED_ON = 3  # that a staggered replica holds: in use, arriving, being sent (``cyclic``)
# Under FSDP2's mixed precision shards of parameters and gradients are in fp32.
IN_FP32 = {dtype: Held(gradient=PRECISE_BYTES, copies=2) for dtype in ("bf16", "fp16")}
LayerRun = tuple[PricedLayer, int]  # a layer, and how many equal ones follow one another
Moment = tuple[int, int, int]  # bytes of gradients, of activations, of temporary tensors
Ranks = tuple[int, int]  # that share out a parameter: dense ones, experts that ep spreads


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a rank's layers; plans that give a rank the same layers share them.

    ``runs``: the layers in forward order, equal ones in a row counted; ``dense``: trained
    parameters that ep does not spread over ranks, ``experts``: those that it does.
    """

    runs: tuple[LayerRun, ...]
    parameters: int
    dense: Trained
    experts: Trained
    once: Once = field(default_factory=Once, compare=False)  # results of plans that share them

    @classmethod
    def of(cls, runs: Sequence[LayerRun]) -> Sizes:
        """Adds up these layers, each as often as it is counted."""
        return cls(
            runs=tuple(runs),
            parameters=sum(x.layer.parameter_bytes * n for x, n in runs),
            dense=Trained.of([(x.layer.dense, n) for x, n in runs]),
            experts=Trained.of([(x.layer.experts, n) for x, n in runs]),
        )

    @property
    def trained(self) -> int:
        """Bytes of parameters with a gradient."""
        return self.dense.nbytes + self.experts.nbytes

    def held_by_rank(
        self, plan: ParallelPlan, optimizer: str, held: Mapping[str, Held]
    ) -> tuple[int, int]:
        """Bytes of gradients and of the optimizer's state that one rank of a plan keeps."""
        strategy, gradients, state = strategy_of(plan), 0, 0
        for part, spread in ((self.dense, False), (self.experts, True)):
            shards, (summed, kept) = plan.shards_of(spread=spread), part.held(held, optimizer)
            gradients += summed // (shards if strategy.share_gradients else 1)
            state += kept // (shards if strategy.share_update else 1)
        return gradients, state


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Bytes of parameters with a gradient by dtype; ``matrices``: of those that Muon updates."""

    by_dtype: Mapping[str, int]
    matrices: int

    @classmethod
    def of(cls, layers: Sequence[tuple[Layer, int]]) -> Trained:
        """The sums over these layers, each this many times."""
        by_dtype = Counter[str]()
        for layer, n in layers:
            for p in layer.trained:
                by_dtype[p.dtype] += p.nbytes * n
        matrices = sum(p.nbytes * n for layer, n in layers for p in layer.trained if p.matrix)
        return cls(by_dtype=by_dtype, matrices=matrices)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.by_dtype.values())

    def held(self, held: Mapping[str, Held], optimizer: str) -> tuple[int, int]:
        """Bytes of gradients, and of the state of an optimizer.

        ``held``: what software holds by dtype; without an entry both are in the parameter's dtype.
        """
        copies = state_copies(optimizer)
        gradients, state = 0, copies * self.nbytes - (self.matrices if copies else 0)
        for dtype, nbytes in self.by_dtype.items():
            copies_of, size = held.get(dtype), ITEMSIZE_BYTES[dtype]
            gradients += nbytes * copies_of.gradient // size if copies_of else nbytes
            wider = copies_of.copies + copies * (PRECISE_BYTES - size) if copies_of else 0
            state += nbytes * wider // size
        return gradients, state


def rank_memory(
    sizes: Sizes,
    plan: ParallelPlan,
    optimizer: str,
    update_share: float = 0.0,
    others: float = 0.0,
    matrix_bytes: int = 0,
    held: Mapping[str, Held] = MappingProxyType({}),
    *,
    made: bool = False,
) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer, activations, buckets and temporary tensors.

    ``update_share``: temporary bytes of the optimizer's step over bytes of gradients;
    ``matrix_bytes``: those of one matrix that Muon updates, or of tables. ``others``: bytes of
    other micro-batches' activations, which a pipeline has in flight. Offloaded state is there in
    the optimizer's step alone. ``held``: what the software holds of a parameter, by dtype; then
    gradients are summed in a buffer from which they are sent, and zero=1 shards the optimizer
    alone. ``made``: gradients exist before a micro-batch begins, from earlier ones or from the step
    before. Shards that lie in host memory are copied to the GPU beside what is gathered of them.
    Not counted: the allocator's rounding, workspaces, the CUDA context.
    """
    strategy, (buffered, held) = strategy_of(plan), held_by_software(sizes, plan, held)
    if buffered:
        strategy = replace(strategy, buckets=False, by_layer=strategy.by_layer and plan.zero > 1)
    summed, state = sizes.held_by_rank(plan, optimizer, held)
    summed *= min(STAGES_HANDED_ON, plan.shards) if strategy.handed_on else 1
    trained, ranks = sizes.trained, (plan.shards, plan.expert_shards)
    key = ("sharded", ranks, strategy)
    sharded, shards = sizes.once(key, partial(_sharded, sizes, ranks, strategy))
    if "parameters" in strategy.offload:
        summed = state = shards = update_share = matrix_bytes = 0
    copies = OUTER_COPIES if strategy.outer else 0
    outer = copies * trained // (plan.shards if strategy.by_layer else 1)
    fetched = state if "optimizer" in strategy.offload else 0  # for the update alone
    updated = sum(  # bytes of gradients that this rank updates parameters by
        (part.nbytes - part.matrices)
        / (plan.shards_of(spread=spread) if strategy.share_update else 1)
        for part, spread in ((sizes.dense, False), (sizes.experts, True))
    )
    of_update = max(round(update_share * updated), matrix_bytes) + fetched
    averaged = strategy.every and not strategy.by_layer  # after the update
    packed = trained if averaged else 0
    known = summed if buffered or strategy.handed_on or made else None
    in_micro = _fullest(sizes, ranks, strategy, round(others), known)
    gradients, activations, temporary = max((summed, 0, max(of_update, packed)), in_micro, key=sum)
    old_weights = trained if plan.cdp and plan.pp > 1 else 0  # weights that backward still needs
    in_buckets = [sizes.dense, sizes.experts] if strategy.expert_replicas > 1 else [sizes.dense]
    by_purpose = {
        "parameters": sizes.parameters - sharded + shards + old_weights,
        "gradients": gradients,
        "optimizer": state - fetched + outer,
        "activations": activations,
        "buckets": sum(part.nbytes for part in in_buckets) if strategy.buckets else 0,
        "temporary": temporary,
    }
    for name, value in plan.more:
        by_purpose = added_keys()[name].memory(by_purpose, plan, value)
    return by_purpose


def held_by_software(
    sizes: Sizes, plan: ParallelPlan, held: Mapping[str, Held]
) -> tuple[bool, Mapping[str, Held]]:
    """Whether the software sums gradients in a buffer, and what is held of a parameter by dtype."""
    buffered = not held.keys().isdisjoint({*sizes.dense.by_dtype, *sizes.experts.by_dtype})
    return buffered, IN_FP32 if plan.amp and plan.zero and not buffered else held


def _sharded(sizes: Sizes, ranks: Ranks, strategy: Strategy) -> tuple[int, int]:
    """Bytes of the parameters that ranks shard, and of one rank's shards; layers are padded."""
    if strategy.handed_on:
        stages = min(STAGES_HANDED_ON, ranks[0])
        return sizes.parameters, stages * -(-sizes.parameters // ranks[0])
    sharded = shards = 0
    for x, count in sizes.runs if strategy.by_layer else ():
        for layer, n in zip((x.layer.dense, x.layer.experts), ranks, strict=True):
            of = layer.trained if strategy.frozen_whole else layer.replicated
            sharded += sum(p.nbytes for p in of) * count
            shards += layer.padded_bytes(n, trained=strategy.frozen_whole) // n * count
    return sharded, shards


def _fullest(
    sizes: Sizes, ranks: Ranks, strategy: Strategy, others: int, kept: int | None
) -> Moment:
    """Bytes (gradients, activations, temporary) at the peak of a micro-batch.

    ``others``: bytes of activations of other micro-batches, held all the time unless offloaded.
    ``kept``: bytes of gradients that exist before it; None: they are made in it.
    """
    key = ("fullest", ranks, strategy, kept)
    found = sizes.once(key, lambda: max(_moments(sizes, ranks, strategy, kept), key=sum))
    gradients, activations, temporary = found
    return gradients, activations + (0 if "activations" in strategy.offload else others), temporary


def _moments(sizes: Sizes, ranks: Ranks, strategy: Strategy, kept: int | None) -> Iterator[Moment]:
    """(gradients, activations, temporary) bytes at each moment that may be the micro-batch's peak.

    For equal layers in a row the first and the last are enough, as bytes change linearly between
    them. Offloaded activations of the layer before are still being copied out in forward; in
    backward the layer's own are there, and those of the next are fetched.
    """
    later, made, level = kept is not None, kept or 0, 0

    def held(*layers: PricedLayer | None) -> int:
        """Bytes of activations so far, or of those of ``layers`` if these are not offloaded."""
        if "activations" not in strategy.offload:
            return level
        return min(level, sum(x.saved_bytes for x in layers if x))

    runs = [part for run in sizes.runs for part in _parts(run)]
    units = _Units(runs, ranks, strategy)
    for at, (x, n) in enumerate(runs):
        ahead, gathered = units.in_forward(x, n)
        before, work = runs[at - 1][0] if at else None, gathered + x.layer.within_forward.peak
        yield 0 if strategy.whole_after_backward else made, held(before), max(ahead, work)
        level += n * (x.layer.within_forward.left - _dropped(x))
    units.in_transit = 0
    for at in range(len(runs) - 1, -1, -1):
        x, n = runs[at]
        before = runs[at - 1][0] if at else None
        whole = later and not strategy.by_layer
        added = x.layer.within_backward.peak if whole else x.layer.peak_bytes
        again = x.layer.within_forward.peak - x.saved_bytes if _dropped(x) else 0
        work = max(again, _dropped(x) + added)
        yield made, held(x, before), work + units.in_backward(x, before)
        level += n * (x.layer.within_backward.left + _dropped(x))
        yield made, held(before), units.after_backward(x, n, before)
        made += n * units.kept_bytes(x, later=later)
    # What waits to be sent, with a copy of the root's gradients; the root's parameters are freed.
    yield made, held(), units.kept_gathered + units.unscattered + units.root_gradients


def _parts(run: LayerRun) -> list[LayerRun]:
    """Equal layers in a row as the first, those between, and the last: pairs (layer, count)."""
    x, n = run
    return [(x, 1), (x, n - 2), (x, 1)] if n > 2 else [(x, 1)] * n


def _dropped(x: PricedLayer) -> int:
    """Bytes that a layer would save for backward but recomputes instead.

    Once its forward has run again it holds them: results that a selective checkpoint keeps and no
    backward reads are handed out, and freed.
    """
    return x.layer.saved_bytes - x.saved_bytes


class _Units:
    """Parameters that FSDP2 has gathered, and gradients that it has not scattered, in bytes.

    - The root, all that is in no numbered layer, is gathered from the start of forward to the end
      of backward, where its gradients are scattered.
    - A numbered layer is gathered for its forward, and the one before is freed once it is there. In
      backward the next one is gathered beside it. After it its gradients are copied to be sent;
      the copy is freed after the next layer's backward. Pipelines gather before any gradient is
      there, layers stay gathered after backward, and gradients are sent at the end.
    - Shards in host memory are copied to the GPU to be gathered; gradients are there until they
      are copied to the host.
    - FSDP2 sees that backward has passed a layer by the gradient of its input; a layer that reads
      no activation has none, and is freed at the end, as the root is.
    """

    def __init__(self, runs: Sequence[LayerRun], ranks: Ranks, strategy: Strategy) -> None:
        (self.ranks, self.expert_ranks), self.strategy = ranks, strategy
        self.on_host = "parameters" in strategy.offload
        self.sends = strategy.by_layer and not strategy.whole_after_backward
        self.root = sum(self._whole(x) * n for x, n in runs if not x.numbered)
        self.kept_gathered = self.in_transit = self.unscattered = self.root_gradients = 0

    def _whole(self, x: PricedLayer) -> int:
        """Bytes of a layer's parameters as gathered; 0 where nothing is gathered."""
        strategy = self.strategy
        return self._gathered(x, trained=strategy.frozen_whole) if strategy.by_layer else 0

    def _gathered(self, x: PricedLayer, *, trained: bool) -> int:
        """Bytes of what ranks shard of a layer, once gathered; experts on one rank are not sharded.

        ``trained``: of gradients before they are scattered.
        """
        nbytes = x.layer.dense.padded_bytes(self.ranks, trained=trained)
        if self.expert_ranks > 1:
            nbytes += x.layer.experts.padded_bytes(self.expert_ranks, trained=trained)
        return nbytes

    def _copied(self, whole: int) -> int:
        """A rank's share of ``whole`` bytes, on its way to or from the host; 0 if not offloaded."""
        return whole // self.ranks if self.on_host else 0

    def _is_late(self, x: PricedLayer) -> bool:
        """Whether a layer's gradients are scattered at the end of backward only."""
        return not x.numbered or x.layer.from_inputs

    def in_forward(self, x: PricedLayer, n: int) -> tuple[int, int]:
        """Bytes while a layer is gathered, and in its forward; it comes ``n`` times in a row."""
        own = self._whole(x) if x.numbered else 0
        before, self.in_transit = self.in_transit, own
        gathered = self.root + self.kept_gathered
        self.kept_gathered += 0 if self.strategy.regather else own * n
        return gathered + before + 2 * own + self._copied(own), gathered + 2 * own

    def in_backward(self, x: PricedLayer, before: PricedLayer | None) -> int:
        """Bytes in the backward of a layer, where ``before`` is gathered next."""
        ahead = self.root + self.kept_gathered + self.unscattered + self.in_transit
        if not (x.numbered and self.strategy.regather):
            return ahead
        asked = self._whole(before) if before and before.numbered else 0
        return ahead + self._whole(x) + asked + self._copied(asked)

    def after_backward(self, x: PricedLayer, n: int, before: PricedLayer | None) -> int:
        """Bytes while memory holds a layer's gradients and their copy to send."""
        if not self.sends:
            self.kept_gathered += self._whole(x) * n if x.numbered and self.strategy.regather else 0
            return 0
        gradients = self._gathered(x, trained=True)
        if self._is_late(x):
            self.unscattered += gradients * n
            self.root_gradients += 0 if x.numbered else gradients * n
            self.kept_gathered += self._whole(x) * n if x.numbered and self.strategy.regather else 0
            return 0
        self.kept_gathered -= 0 if self.strategy.regather else self._whole(x) * n
        self.in_transit = gradients + self._copied(gradients)
        ahead = self._whole(before) if before and before.numbered and self.strategy.regather else 0
        return self.root + self.kept_gathered + self.unscattered + ahead + 2 * gradients

    def kept_bytes(self, x: PricedLayer, *, later: bool) -> int:
        """Bytes by which kept gradients grow; ``later``: they exist from earlier micro-batches."""
        if not self.sends:
            return 0 if later else x.layer.trained_bytes
        if (later and self.strategy.share_gradients) or self._is_late(x) or self.on_host:
            return 0
        share = x.layer.dense.padded_bytes(self.ranks, trained=True) // self.ranks
        experts = x.layer.experts.padded_bytes(self.expert_ranks, trained=True)
        share += experts // self.expert_ranks
        return share - x.layer.trained_bytes * later
