"""ZeRO as FSDP2 runs it: parameters are gathered before each layer, gradients scattered after it.

- zero=3: gathered in forward and in backward, scattered after every micro-batch;
- zero=2: gathered in forward and kept until the layer's backward is done (reshard_after_forward
  off);
- zero=1: gathered in the first micro-batch, scattered in the last, gradients whole in between;
  frozen parameters are whole on every rank.

Numbered layers are sharded one by one, the rest of the model as one, the root, which is gathered
before forward and kept. With hsdp each scattered share is all-reduced among the groups of ranks
that shard (HSDP). On a GPU a gather runs one layer ahead and a scatter behind, on the comm
lane; on a CPU there are no streams and torch waits for each where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from itercast.capture.base.assumptions import assumed
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.host import python_op
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.pricing.work import Work
from itercast.compose.simulate.rank import RankTasks

FORWARD_SHARE: float = assumed(__file__, "forward_share")


def sharded_forward(program: RankTasks, *, gather: bool) -> None:
    """Add the forward of one micro-batch; ``gather``: parameters are sharded at its start."""
    layers = program.rank.layers
    root = sum(sharded_bytes(x, program) for x in layers if not x.numbered)
    sizes = {root} | {sharded_bytes(x, program) for x in layers if x.numbered}
    kinds = ("all_gather", "reduce_scatter")
    messages = [_message(program, kind, n) for kind in kinds for n in sorted(sizes) if n]
    price_messages(messages, program.rank.book, program.rank.where)  # one call of the pricer
    if root and gather:
        program.lanes.wait([_send(program, "all_gather", root)])
    markers: list[tuple[int, ...]] = [program.lanes.done]
    for k, x in enumerate(layers):
        copies = _gathered(program, x, markers[max(0, k - 1)]) if gather else Work()
        python = hooks(program, x, FORWARD_SHARE)
        program.lanes.work(python.then(copies).then(x.forward_work), x.layer.name)
        markers.append(program.lanes.done)


def sharded_backward(program: RankTasks, *, scatter: bool, later: bool) -> None:
    """Add the backward of one micro-batch under FSDP.

    ``scatter``: gradients are reduce-scattered after it; ``later``: they are added to those of
    earlier micro-batches.
    """
    layers, how = list(reversed(program.rank.layers)), program.how
    markers: list[tuple[int, ...]] = [program.lanes.done]
    last: list[int] = []
    for k, x in enumerate(layers):
        work = _gathered(program, x, markers[max(0, k - 1)]) if how.regather else Work()
        work = work.then(hooks(program, x, 1 - FORWARD_SHARE))
        work = work.then(x.later_work if later and not how.every_micro else x.backward_work)
        if scatter and x.numbered:
            program.copies += x.trained_only(x.into_bucket)
            work = work.then(x.into_work)
        program.lanes.work(work, x.layer.name)
        markers.append(program.lanes.done)
        if scatter and x.numbered and x.layer.trained_bytes:
            last += _reduce(program, sharded_bytes(x, program, trained=True))
            _wait_on_cpu(program, last)
    root = sum(sharded_bytes(x, program, trained=True) for x in layers if not x.numbered)
    if scatter and root:
        last += _reduce(program, root)
    program.lanes.wait(last)


def sharded_bytes(x: PricedLayer, program: RankTasks, *, trained: bool = False) -> int:
    """Bytes of a layer's parameters that are sharded over replicas, and so gathered before use.

    ``trained``: of their gradients.
    """
    ranks, only = program.rank.plan.shards, trained or program.how.frozen_whole
    return x.layer.padded_bytes(ranks, trained=only)


def hooks(program: RankTasks, x: PricedLayer, share: float, times: int = 1) -> Work:
    """Host time of a layer's FSDP hooks, called ``times`` times.

    ``share`` of them runs in forward or in backward.
    """
    event = "fsdp_layer" if program.how.regather else "fsdp_layer_kept"
    count = len(x.layer.trained if program.how.frozen_whole else x.layer.replicated)
    if not count:
        return Work()
    python = python_op(event, count, program.rank.book, share)
    program.copies += [python] * times
    return x.fold([python])


def _gathered(program: RankTasks, x: PricedLayer, after: tuple[int, ...]) -> Work:
    """Gather parameters, one layer ahead of compute; returns the copies out of the message."""
    nbytes = sharded_bytes(x, program)
    if not x.numbered or not nbytes:
        return Work()
    on_cpu = program.lanes.on_cpu
    sent = _send(program, "all_gather", nbytes, None if on_cpu else after)
    program.lanes.wait([sent])
    if program.how.frozen_whole:
        program.copies += x.trained_only(x.out_of_bucket)
        return x.trained_out_work
    program.copies += x.replicated_only(x.out_of_bucket)
    return x.out_work


def _reduce(program: RankTasks, nbytes: int) -> list[int]:
    """Scatter gradients within a group that shards, and add up shares among the groups.

    Under local SGD groups do not add up gradients.
    """
    plan = program.rank.plan
    sent = [_send(program, "reduce_scatter", nbytes)]
    if plan.shards < plan.dp * plan.cp and not program.how.every:
        share = program.price([_share(program, nbytes)])[0]
        sent.append(program.lanes.send(share, after=tuple(sent)))
    return sent


def averaged_shards(program: RankTasks) -> Message:
    """The average of a rank's shards among the groups, under local SGD."""
    size = sum(sharded_bytes(x, program, trained=True) for x in program.rank.layers)
    return _share(program, size)


def _share(program: RankTasks, nbytes: int) -> Message:
    """The sum of a rank's share of so many bytes among the groups."""
    own_bytes = max(1, nbytes // program.rank.plan.shards)
    return replace(_message(program, "all_reduce", own_bytes), axis="replicate")


def _wait_on_cpu(program: RankTasks, sent: Sequence[int]) -> None:
    if program.lanes.on_cpu:
        program.lanes.wait(sent[-1:])


def _send(program: RankTasks, kind: str, nbytes: int, after: tuple[int, ...] | None = None) -> int:
    return program.lanes.send(program.price([_message(program, kind, nbytes)])[0], after=after)


def _message(program: RankTasks, kind: str, nbytes: int) -> Message:
    layers = program.rank.layers
    dtype = next((p.dtype for x in layers for p in x.layer.trained), "fp32")
    return Message(kind=kind, axis="shard", message_bytes=nbytes, dtype=dtype)
