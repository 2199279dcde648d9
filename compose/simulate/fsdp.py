"""ZeRO as FSDP2 runs it: parameters are gathered before each layer, gradients scattered after it.

- zero=3: gathered in forward and in backward, scattered after every micro-batch;
- zero=2: gathered in forward and kept until the layer's backward is done (reshard_after_forward
  off);
- zero=1: gathered in the first micro-batch, scattered in the last, gradients whole in between;
  frozen parameters are whole on every rank.

Numbered layers are sharded one by one, the rest of the model as one, the root, which is gathered
before forward and kept. Experts that ep spreads are sharded apart, among the ranks that have the
same ones, as torchtitan and Megatron-LM do. With hsdp each scattered share is all-reduced among the
groups of ranks that shard (HSDP). On a GPU a gather runs one layer ahead and a scatter behind, on
the comm lane, and sums among groups beside the next scatter, on theirs (FSDP2's
``FSDPCommContext.all_reduce_stream``; not so of software that has one stream for both); on a CPU
there are no streams and torch waits for each where it is. With amp parameters are gathered in half
precision and gradients reduced in fp32, as FSDP2's tutorial and torchtitan do (param_dtype bf16,
reduce_dtype fp32), unless the software reduces them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import ITEMSIZE_BYTES
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.host import python_op
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.pricing.work import Work
from itercast.compose.simulate.rank import AMONG_GROUPS, Rank, RankTasks
from itercast.microbench.hardware.stack import stack_of_row

PRECISE = "fp32"
NONE: tuple[list[int], Work] = ([], Work())
FORWARD_SHARE: float = assumed(__file__, "forward_share")


def sharded_forward(program: RankTasks, *, gather: bool) -> None:
    """Add the forward of one micro-batch; ``gather``: parameters are sharded at its start."""
    layers = program.rank.layers
    root = sharded_bytes([x for x in layers if not x.numbered], program)
    each = [sharded_bytes([x], program) for x in {id(x): x for x in layers if x.numbered}.values()]
    sizes = sorted({(on, n) for one in (root, *each) for on, n in one.items()})
    kinds = ("all_gather", "reduce_scatter")
    messages = [_message(program, kind, on, n) for kind in kinds for on, n in sizes]
    price_messages(messages, program.rank.book, program.rank.where)  # one call of the pricer
    if root and gather:
        program.lanes.wait(_send(program, "all_gather", root))
    markers: list[tuple[int, ...]] = [program.lanes.done]
    for k, x in enumerate(layers):
        sent, copies = _gathered(program, x, markers[max(0, k - 1)]) if gather else NONE
        program.lanes.wait(sent)
        python = hooks(program, x, FORWARD_SHARE)
        program.lanes.work(python.then(copies).then(x.forward_work), x.layer.name)
        program.to_host(x)
        markers.append(program.lanes.done)


def sharded_backward(program: RankTasks, *, scatter: bool, later: bool) -> None:
    """Add the backward of one micro-batch under FSDP.

    ``scatter``: gradients are reduce-scattered after it; ``later``: they are added to those of
    earlier micro-batches. Before a layer's backward the next one is asked for, so that its gather
    is ahead of the scatter after it; on a CPU where it is needed.
    """
    layers, how = list(reversed(program.rank.layers)), program.how
    sent, copies = _gathered_again(program, layers[:1])
    markers: list[tuple[int, ...]] = [program.lanes.done]
    last: list[int] = []
    for k, x in enumerate(layers):
        program.pause(len(layers) - 1 - k)
        program.from_host(x, markers[max(0, k - 1)])
        program.lanes.wait(sent)
        python = hooks(program, x, 1 - FORWARD_SHARE) if x.fetches else Work()
        work = copies.then(python)
        if not program.lanes.on_cpu:
            sent, copies = _gathered_again(program, layers[k + 1 : k + 2])
        work = work.then(x.later_work if later and not how.every_micro else x.backward_work)
        if scatter and x.numbered:
            own = _sharded(program, x)
            program.copies += own.scattered
            work = work.then(own.fold(own.scattered))
        program.lanes.work(work, x.layer.name)
        markers.append(program.lanes.done)
        if scatter and x.numbered and x.layer.trained_bytes:
            last += _reduce(program, [x])
            _wait_on_cpu(program, last)
        if program.lanes.on_cpu:
            sent, copies = _gathered_again(program, layers[k + 1 : k + 2])
    if scatter:
        last += _reduce(program, [x for x in layers if not x.numbered])
    program.lanes.wait(last)


def sharded_bytes(
    layers: Sequence[PricedLayer], program: RankTasks, *, trained: bool = False
) -> dict[str, int]:
    """By axis the bytes of layers' parameters that its ranks share out, and so gather before use.

    ``trained``: of their gradients.
    """
    plan, only = program.rank.plan, trained or program.how.frozen_whole
    dense = sum(x.layer.dense.padded_bytes(plan.shards, trained=only) for x in layers)
    found = {"shard": dense}
    if plan.expert_shards > 1:
        ranks = plan.expert_shards
        experts = (x.layer.experts.padded_bytes(ranks, trained=only) for x in layers)
        found["expert_shard"] = sum(experts)
    return {axis: n for axis, n in found.items() if n}


def _sharded(program: RankTasks, x: PricedLayer) -> PricedLayer:
    """A layer with those parameters that ranks share out."""
    return x if program.rank.plan.expert_shards > 1 else x.without_experts


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


def _gathered(program: RankTasks, x: PricedLayer, after: tuple[int, ...]) -> tuple[list[int], Work]:
    """Send the all_gather of a layer's parameters; returns it, and the work of copying them out.

    On a GPU it starts after the tasks ``after``. Nothing where FSDP does not wrap the layer.
    """
    nbytes, own = sharded_bytes([x], program), _sharded(program, x)
    if not x.numbered or not nbytes:
        return NONE
    sent = _send(program, "all_gather", nbytes, None if program.lanes.on_cpu else after)
    copies = own.gathered_trained if program.how.frozen_whole else own.gathered
    program.copies += copies
    return sent, own.fold(copies)


def _gathered_again(program: RankTasks, layers: Sequence[PricedLayer]) -> tuple[list[int], Work]:
    """Gather a layer's parameters for its backward where they are not kept; of no layer nothing."""
    if not layers or not program.how.regather or not layers[0].fetches:
        return NONE
    return _gathered(program, layers[0], program.lanes.done)


def _reduce(program: RankTasks, layers: Sequence[PricedLayer]) -> list[int]:
    """Scatter gradients within the groups that shard, and add up shares among these groups.

    Under local SGD groups do not add up gradients.
    """
    sent = _send(program, "reduce_scatter", sharded_bytes(layers, program, trained=True))
    shares = [] if program.how.every else summed_shares(layers, program)
    scattered = tuple(sent) or None
    lane = "comm" if stack_of_row(program.rank.book.stack).one_stream else AMONG_GROUPS
    return sent + [program.lanes.send(op, lane, scattered) for op in program.price(shares)]


def summed_shares(layers: Sequence[PricedLayer], program: RankTasks) -> list[Message]:
    """The sums of a rank's shares of gradients, or averages of parameters, among the groups."""
    plan, sums = program.rank.plan, list[Message]()
    beyond = {"replicate": plan.dp * plan.cp // plan.shards}
    beyond["expert_replicate"] = plan.expert_replicas // plan.expert_shards
    for axis, groups in beyond.items():
        spread = axis == "expert_replicate"
        ranks = plan.shards_of(spread=spread)
        parts = (x.layer.experts if spread else x.layer.dense for x in layers)
        nbytes = sum(part.padded_bytes(ranks, trained=True) for part in parts)
        if nbytes and groups > 1:
            sums.append(_message(program, "all_reduce", axis, max(1, nbytes // ranks)))
    return sums


def _wait_on_cpu(program: RankTasks, sent: Sequence[int]) -> None:
    if program.lanes.on_cpu:
        program.lanes.wait(sent[-1:])


def _send(
    program: RankTasks,
    kind: str,
    nbytes: Mapping[str, int],
    after: tuple[int, ...] | None = None,
) -> list[int]:
    """Send so many bytes along each axis."""
    messages = [_message(program, kind, axis, n) for axis, n in nbytes.items()]
    return [program.lanes.send(op, after=after) for op in program.price(messages)]


def _message(program: RankTasks, kind: str, axis: str, nbytes: int) -> Message:
    layers = program.rank.layers
    dtype = next((p.dtype for x in layers for p in x.layer.trained), PRECISE)
    message = Message(kind=kind, axis=axis, message_bytes=nbytes, dtype=dtype)
    return message if kind == "all_gather" else reduced_message(program.rank, message)


def reduced_message(rank: Rank, message: Message) -> Message:
    """A message of gradients, in fp32 with amp unless the software reduces them as they are."""
    if not rank.plan.amp or stack_of_row(rank.book.stack).reduces_half:
        return message
    nbytes = message.message_bytes * ITEMSIZE_BYTES[PRECISE] // ITEMSIZE_BYTES[message.dtype]
    return replace(message, message_bytes=nbytes, dtype=PRECISE)
