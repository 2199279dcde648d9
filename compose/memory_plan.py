"""Peak memory of a rank under a plan, by what it is for."""

from __future__ import annotations

from collections.abc import Sequence

from compose.plan import ParallelPlan
from compose.step import PricedLayer
from compose.sync import strategy
from compose.update import STATE_COPIES


def rank_memory(
    layers: Sequence[PricedLayer],
    plan: ParallelPlan,
    optimizer: str,
    update_share: float = 0.0,
    held: float | None = None,
    tied_bytes: int = 0,
) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer, activations, buckets and temporary tensors.

    ``update_share``: what the optimizer makes and drops, by byte of gradients. ``held``: bytes of
    activations in flight in a pipeline; None: one micro-batch at a time, whose activations go as
    its gradients come. Not counted: the allocator's rounding, workspaces, the CUDA context.
    """
    how, n = strategy(plan), plan.dp * plan.cp
    whole = sum(x.layer.parameter_bytes for x in layers) + tied_bytes
    trained = sum(x.layer.trained_bytes for x in layers) + tied_bytes
    parameters = whole // n if how.by_layer else whole
    gathered = whole if how.by_layer else 0
    if how.regather:  # two layers at a time, and the root
        sizes = [x.layer.parameter_bytes for x in layers if x.numbered]
        gathered += sum(sorted(sizes)[-2:]) - sum(sizes)
    state = STATE_COPIES[optimizer] * trained // (n if how.share_update else 1)
    kept = trained // (n if how.share_gradients else 1)
    updating = (kept, 0, round(update_share * trained / (n if how.share_update else 1)))
    backward = _peak(layers, plan, trained, n if how.share_gradients else 1, held)
    gradients, activations, work = max(backward, updating, key=sum)
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": 0 if plan.offload == "optimizer" else state,
        "activations": activations,
        "buckets": trained if how.buckets else 0,
        "temporary": work + gathered + (state if plan.offload == "optimizer" else 0),
    }


def _peak(
    layers: Sequence[PricedLayer],
    plan: ParallelPlan,
    trained: int,
    share: int,
    held: float | None,
) -> tuple[int, int, int]:
    """(gradients, activations, temporary) where their sum is largest in backward."""
    again = [x.layer.saved_bytes if x.saved_bytes < x.layer.saved_bytes else 0 for x in layers]
    work = [x.layer.work_bytes + more for x, more in zip(layers, again, strict=True)]
    saved = [x.saved_bytes for x in layers]
    if plan.offload == "activations":
        pair = sum(sorted(saved)[-2:])
        return trained // share, pair, max(work, default=0)
    if held is not None or plan.microbatches > 1:
        kept = int(held) if held is not None else sum(saved)
        return trained // share, kept, max(work, default=0)
    best, left, made = (0, 0, 0), sum(saved), 0
    for i in range(len(layers) - 1, -1, -1):
        own = layers[i].layer.trained_bytes
        made += own
        now = (made // share, left, work[i])
        left -= saved[i]
        scattered = (made // share, left, 2 * own if share > 1 else 0)  # whole, and joined to send
        best = max(best, now, scattered, key=sum)
    return best
