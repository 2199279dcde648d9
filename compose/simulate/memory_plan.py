"""Peak memory of a rank under a plan, by purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.pricing.optimizer import OUTER_COPIES, STATE_COPIES
from itercast.compose.simulate.data_parallel import Strategy, strategy
from itercast.microbench.plan import ParallelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a rank's layers; plans that give a rank the same layers share them.

    ``replicated``: parameters that other replicas have too; ``numbered``: those of layers that FSDP
    shards one by one; ``pair``: of the two largest of these; ``work``: the largest temporary memory
    within one layer's forward or backward; ``matrices``: of parameters that Muon updates.
    """

    layers: tuple[PricedLayer, ...]
    parameters: int
    replicated: int
    trained: int
    numbered: int
    pair: int
    work: int
    matrices: int = 0

    @classmethod
    def of(cls, layers: Sequence[PricedLayer]) -> Sizes:
        """Sizes of these layers."""
        sizes = sorted(sum(p.nbytes for p in x.layer.replicated) for x in layers if x.numbered)
        return cls(
            layers=tuple(layers),
            parameters=sum(x.layer.parameter_bytes for x in layers),
            replicated=sum(p.nbytes for x in layers for p in x.layer.replicated),
            trained=sum(x.layer.trained_bytes for x in layers),
            matrices=sum(p.nbytes for x in layers for p in x.layer.trained if p.matrix),
            numbered=sum(sizes),
            pair=sum(sizes[-2:]),
            work=max(map(_work, layers), default=0),
        )


def _work(x: PricedLayer) -> int:
    """Temporary bytes within a layer, with the activations that it recomputes."""
    again = x.again_bytes if x.saved_bytes < x.layer.saved_bytes else 0
    return x.layer.work_bytes + again


def rank_memory(
    sizes: Sizes,
    plan: ParallelPlan,
    optimizer: str,
    update_share: float = 0.0,
    held: float | None = None,
    matrix_bytes: int = 0,
) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer, activations, buckets and temporary tensors.

    ``update_share``: temporary bytes of the optimizer's step over bytes of gradients;
    ``matrix_bytes``: those of one matrix that Muon updates. ``held``:
    bytes of activations in flight in a pipeline; None: one micro-batch at a time, whose activations
    are freed as its gradients are made. Gathered parameters are there until the end of backward,
    offloaded state only in the optimizer's step. Not counted: the allocator's rounding,
    workspaces, the CUDA context.
    """
    how, n = strategy(plan), plan.shards
    whole, trained = sizes.parameters, sizes.trained
    sharded = (trained if how.frozen_whole else sizes.replicated) if how.by_layer else 0
    parameters = whole - sharded + sharded // n
    gathered = sharded
    if how.regather:  # two layers at a time, and the root
        gathered += sizes.pair - sizes.numbered
    state = (STATE_COPIES[optimizer] * trained - sizes.matrices) // (n if how.share_update else 1)
    outer = OUTER_COPIES * trained // (n if how.by_layer else 1) if how.outer else 0
    fetched = state if how.offload == "optimizer" else 0  # for the update alone
    kept = trained // (n if how.share_gradients else 1)
    others = (trained - sizes.matrices) / (n if how.share_update else 1)
    made = max(round(update_share * others), matrix_bytes)
    packed = trained if how.every and not how.by_layer else 0  # to be averaged after the update
    updating = (kept, 0, max(made + fetched, packed))
    gradients, activations, work = _peak(sizes, plan, how, held)
    backward = (gradients, activations, work + gathered)
    gradients, activations, temporary = max(backward, updating, key=sum)
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": state - fetched + outer,
        "activations": activations,
        "buckets": trained if how.buckets else 0,
        "temporary": temporary,
    }


def _peak(
    sizes: Sizes, plan: ParallelPlan, how: Strategy, held: float | None
) -> tuple[int, int, int]:
    """(gradients, activations, temporary) where their sum is largest in backward."""
    trained, share = sizes.trained, plan.shards if how.share_gradients else 1
    if held is not None and how.offload != "activations":
        return trained // share, int(held), sizes.work
    saved = [x.saved_bytes for x in sizes.layers]
    if how.offload == "activations":
        return trained // share, sum(sorted(saved)[-2:]), sizes.work
    if plan.microbatches > 1:
        return trained // share, sum(saved), sizes.work
    best, left, made = (0, 0, 0), sum(saved), 0
    for x in reversed(sizes.layers):
        gradients = x.layer.trained_bytes
        made += gradients
        now = (made // share, left, _work(x))
        left -= x.saved_bytes
        scattered = (
            made // share,
            left,
            2 * gradients if share > 1 else 0,
        )  # and their copy to send
        best = max(best, now, scattered, key=sum)
    return best
