"""ZeRO as FSDP2 runs it: parameters are gathered before each layer, gradients scattered after it.

- zero=3: gathered in forward and in backward, scattered after every micro-batch, with no_sync
  after the last one: gradients are whole until then (``set_requires_gradient_sync(False)``);
- zero=2: gathered in forward and kept until the layer's backward is done (reshard_after_forward
  off);
- zero=1: gathered in the first micro-batch, scattered in the last, gradients whole in between;
  frozen parameters are whole on every rank.

In a pipeline gradients stay whole until the last micro-batch with zero=2 and 3, too, and with
zero=2 parameters; with zero=3 these stay from a backward until the next forward gives them up, and
are gathered once more than there are micro-batches, those of the root once:
torch/distributed/pipelining/stage.py, ``backward_maybe_with_nosync``.

Numbered layers are sharded one by one, the rest of the model as one, the root, which is gathered
before forward and kept. Megatron's distributed optimizer overlaps nothing unless asked to, nor do
DeepSpeed's ZeRO 1 and 2: under ``reduces_late`` the whole model is the root, its trained weights
are gathered once a step, and ZeRO 2 scatters after the backward of each micro-batch.

With offload=parameters a rank's shards lie in pinned host memory (``CPUOffloadPolicy``): they are
copied to the GPU before each gather, one layer further ahead in forward (a stream of their own),
and gradients to the host after each scatter, which the next one waits for (one stream). Sums of
micro-batches' gradients, and the optimizer, run on the CPU. Source:
torch/distributed/fsdp/_fully_shard, ``foreach_all_gather``, ``foreach_reduce``. Experts that ep
spreads are sharded apart, among the ranks that have the same ones, as torchtitan and Megatron-LM
do. With hsdp each scattered share is all-reduced among the groups of ranks that shard (HSDP). On a
GPU a gather runs one layer ahead and a scatter behind, on the comm lane, and sums among groups
beside the next scatter, on theirs (FSDP2's ``FSDPCommContext.all_reduce_stream``; not so of
software that has one stream for both); on a CPU there are no streams and torch waits for each where
it is. With amp parameters are gathered in half precision and gradients reduced in fp32, as FSDP2's
tutorial and torchtitan do (param_dtype bf16, reduce_dtype fp32), unless the software or
compress=0.5 reduces them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import ITEMSIZE_BYTES
from itercast.compose.graph.layers import Layer
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.host import python_op
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.pricing.work import Work
from itercast.compose.simulate.data_parallel import PRECISE
from itercast.compose.simulate.rank import AMONG_GROUPS, Rank, RankTasks
from itercast.microbench.hardware.stack import stack_of_row

NONE: tuple[list[int], Work] = ([], Work())
FORWARD_SHARE: float = assumed(__file__, "forward_share")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Layers that FSDP wraps as one, a numbered layer or the root, and what it sends for them.

    Equal layers of a program are priced once.
    """

    rank: Rank
    layers: tuple[PricedLayer, ...]

    @classmethod
    def of(cls, program: RankTasks, *layers: PricedLayer) -> Unit:
        """The unit of these layers in a program."""
        made = partial(cls, rank=program.rank, layers=layers)
        return program.once(("unit", *map(id, layers)), made)

    @cached_property
    def gathers(self) -> list[PricedOp]:
        """The all_gather of parameters, along each axis."""
        return self._priced("all_gather", trained=False)

    @cached_property
    def scatters(self) -> list[PricedOp]:
        """The reduce_scatter of gradients, or DeepSpeed's all_reduce, along each axis."""
        return self._priced(self.rank.strategy.scatter, trained=True)

    @cached_property
    def shards(self) -> tuple[int, int]:
        """Bytes of a rank's shards: of parameters, and of gradients (``shard_bytes``)."""
        plan = self.rank.plan
        pairs = [shard_bytes(x.layer.dense, plan.shards, fp32=plan.amp) for x in self.layers]
        return sum(parameters for parameters, _ in pairs), sum(grads for _, grads in pairs)

    @cached_property
    def sums(self) -> list[PricedOp]:
        """The sums of shares of gradients among groups that shard; local SGD has none."""
        sums = [] if self.rank.strategy.every else summed_shares(self.layers, self.rank)
        return price_messages(sums, self.rank.book, self.rank.cluster)

    @cached_property
    def gathered(self) -> tuple[tuple[PricedOp, ...], Work]:
        """The copies out of a layer's gathered buffer, as ops and as work."""
        x = self._sharded
        copies = x.gathered_trained if self.rank.strategy.frozen_whole else x.gathered
        return copies, x.fold(copies)

    @cached_property
    def scattered(self) -> tuple[tuple[PricedOp, ...], Work]:
        """The copies of a layer's gradients into what is scattered, and their work."""
        return self._sharded.scattered, self._sharded.fold(self._sharded.scattered)

    @cached_property
    def hooks(self) -> dict[float, tuple[PricedOp, Work]]:
        """Host time of a layer's hooks, as op and work, by the share of them that a pass runs.

        Forward and backward run a part each; share 1 is both.
        """
        (x,), strategy = self.layers, self.rank.strategy
        event = "fsdp_layer" if strategy.regather else "fsdp_layer_kept"
        count = len(x.layer.trained if strategy.frozen_whole else x.layer.replicated)
        shares = (FORWARD_SHARE, 1 - FORWARD_SHARE, 1.0) if count else ()
        ops = {share: python_op(event, count, self.rank.book, share) for share in shares}
        return {share: (op, x.fold([op])) for share, op in ops.items()}

    @property
    def _sharded(self) -> PricedLayer:
        """The layer with those parameters that ranks share out."""
        (x,) = self.layers
        return x if self.rank.plan.expert_shards > 1 else x.without_experts

    @property
    def messages(self) -> list[Message]:
        """All messages of its parameters and gradients."""
        kinds = (("all_gather", False), (self.rank.strategy.scatter, True))
        sent = [m for kind, trained in kinds for m in self._messages(kind, trained=trained)]
        return sent + summed_shares(self.layers, self.rank)

    def _messages(self, kind: str, *, trained: bool) -> list[Message]:
        """Collectives over its parameters, or of the ``trained`` ones' gradients, by axis."""
        nbytes = sharded_bytes(self.layers, self.rank, trained=trained)
        return [_message(self.rank, kind, axis, n) for axis, n in nbytes.items()]

    def _priced(self, kind: str, *, trained: bool) -> list[PricedOp]:
        messages = self._messages(kind, trained=trained)
        return price_messages(messages, self.rank.book, self.rank.cluster)


def is_apart(rank: Rank, x: PricedLayer) -> bool:
    """Whether a layer is sharded as one of its own; software that sends late has one for all."""
    return x.numbered and not rank.strategy.late


def units_of_stages(rank: Rank) -> list[Unit]:
    """The units that FSDP makes of a model on any stage: the root, and each layer by itself."""
    layers = [x for x in rank.model.layers for _ in range(1 if x.numbered else x.layer.count)]
    root = tuple(x for x in layers if not x.numbered)
    return [Unit(rank=rank, layers=wrapped) for wrapped in (root, *((x,) for x in layers))]


def sharded_forward(program: RankTasks, *, gather: bool) -> None:
    """Add the forward of one micro-batch; ``gather``: parameters are sharded at its start."""
    layers, rank = program.rank.layers, program.rank
    root = Unit.of(program, *(x for x in layers if not is_apart(rank, x)))
    units = [root, *(Unit.of(program, x) for x in layers if is_apart(rank, x))]
    sizes = {size for unit in units for size in sharded_bytes(unit.layers, rank).items()}
    kinds = ("all_gather", rank.strategy.scatter)
    messages = [_message(rank, kind, on, n) for kind in kinds for on, n in sorted(sizes)]
    price_messages(messages, rank.book, rank.cluster)  # one call of the pricer
    if gather and root.gathers:
        fetched = program.fetch(root.shards[0], program.lanes.done)
        program.lanes.wait(_send(program, root.gathers, (*program.lanes.done, *fetched)))
    markers: list[tuple[int, ...]] = [program.lanes.done]
    for k, x in enumerate(layers):
        after, earlier = (markers[max(0, k - n)] for n in (1, 2))
        sent, copies = _gathered(program, x, after, earlier) if gather else NONE
        program.lanes.wait(sent)
        python = hooks(program, x, FORWARD_SHARE)
        program.lanes.work(python.then(copies).then(x.forward_work), x.layer.name)
        program.to_host(x)
        markers.append(program.lanes.done)


def sharded_backward(program: RankTasks, *, scatter: bool, later: bool) -> None:
    """Add the backward of one micro-batch under FSDP.

    ``scatter``: gradients are reduce-scattered after it; ``later``: they are added to those of
    earlier micro-batches. A layer's gather is launched before the backward of the layer above, and
    so before that layer's scatter; on a CPU, where nothing overlaps, after it.
    """
    layers, strategy = list(reversed(program.rank.layers)), program.strategy
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
        work = work.then(x.later_work if later and not strategy.scatters_each else x.backward_work)
        apart = scatter and is_apart(program.rank, x)
        if apart:
            into, packing = Unit.of(program, x).scattered
            program.copies += into
            work = work.then(packing)
        program.lanes.work(work, x.layer.name)
        markers.append(program.lanes.done)
        if apart and x.layer.trained_bytes:
            last += _reduce(program, Unit.of(program, x), later=later)
            if program.lanes.on_cpu:
                program.lanes.wait(last[-1:])
        if program.lanes.on_cpu:
            sent, copies = _gathered_again(program, layers[k + 1 : k + 2])
    if scatter:
        root = (x for x in program.rank.layers if not is_apart(program.rank, x))
        last += _reduce(program, Unit.of(program, *root), later=later)
    program.lanes.wait(last)


def sharded_bytes(
    layers: Sequence[PricedLayer], rank: Rank, *, trained: bool = False
) -> dict[str, int]:
    """Bytes of layers' parameters that the ranks of an axis shard, and gather before use; by axis.

    ``trained``: of their gradients.
    """
    plan, trained = rank.plan, trained or rank.strategy.frozen_whole
    layers = [x for x in layers if x.sharded or trained]
    dense = sum(x.layer.dense.padded_bytes(plan.shards, trained=trained) for x in layers)
    by_axis = {"shard": dense}
    if plan.expert_shards > 1:
        ranks = plan.expert_shards
        experts = (x.layer.experts.padded_bytes(ranks, trained=trained) for x in layers)
        by_axis["expert_shard"] = sum(experts)
    return {axis: nbytes for axis, nbytes in by_axis.items() if nbytes}


def shard_bytes(layer: Layer, ranks: int, *, fp32: bool) -> tuple[int, int]:
    """Bytes of one rank's shard of a layer's parameters, and of its gradients, among ``ranks``.

    ``fp32``: parameters with a gradient are kept in fp32, as under mixed precision. Frozen ones
    stay as they are, in 4 bits too.
    """
    all_bytes = layer.padded_bytes(ranks, trained=False) // ranks
    trained_bytes = layer.padded_bytes(ranks, trained=True) // ranks
    itemsize = next((ITEMSIZE_BYTES[p.dtype] for p in layer.trained), 1)
    kept_bytes = trained_bytes * ITEMSIZE_BYTES[PRECISE] // itemsize if fp32 else trained_bytes
    return all_bytes - trained_bytes + kept_bytes, kept_bytes


def hooks(program: RankTasks, x: PricedLayer, share: float, times: int = 1) -> Work:
    """Host time of a layer's FSDP hooks, called ``times`` times; ``program.copies`` gets them too.

    ``share`` of a hook's time: FORWARD_SHARE, the rest of it for backward, or 1 for both.
    """
    hooks_by_share = Unit.of(program, x).hooks
    if share not in hooks_by_share:
        return Work()
    python, work = hooks_by_share[share]
    program.copies += [python] * times
    return work


def _gathered(
    program: RankTasks, x: PricedLayer, after: tuple[int, ...], earlier: tuple[int, ...]
) -> tuple[list[int], Work]:
    """Send the all_gather of a layer's parameters; returns its tasks, and the work of copying out.

    On a GPU it starts after the tasks ``after``; shards in host memory are copied to the GPU
    before, after the tasks ``earlier``. ``NONE`` where FSDP does not wrap the layer.
    """
    unit = Unit.of(program, x)
    if not is_apart(program.rank, x) or not unit.gathers:
        return NONE
    fetched = program.fetch(unit.shards[0], earlier)
    sent = _send(program, unit.gathers, None if program.lanes.on_cpu else (*after, *fetched))
    copies, work = unit.gathered
    program.copies += copies
    return sent, work


def _gathered_again(program: RankTasks, layers: Sequence[PricedLayer]) -> tuple[list[int], Work]:
    """Gather the first layer's parameters for its backward; ``NONE`` if kept, or without layers."""
    if not layers or not program.strategy.regather or not layers[0].fetches:
        return NONE
    return _gathered(program, layers[0], program.lanes.done, program.lanes.done)


def _reduce(program: RankTasks, unit: Unit, *, later: bool) -> list[int]:
    """Scatter gradients within the groups that shard, then all_reduce the shards between groups.

    Returns the tasks to wait for. No all_reduce under local SGD. ``later``: of a micro-batch after
    the first.
    """
    behind = program.copied[-1:] if "parameters" in program.strategy.offload else []
    sent = _send(program, unit.scatters, (*program.lanes.done, *behind))
    lane = "comm" if stack_of_row(program.rank.book.stack).one_stream else AMONG_GROUPS
    sent += _send(program, unit.sums, tuple(sent) or None, lane)
    return sent + program.keep(unit.shards[1], tuple(sent), later=later)


def summed_shares(layers: Sequence[PricedLayer], rank: Rank) -> list[Message]:
    """All_reduces of gradient (or parameter) shards between ranks that hold the same shard."""
    plan, sums = rank.plan, list[Message]()
    groups_by_axis = {
        "replicate": plan.dp * plan.cp // plan.shards,
        "expert_replicate": plan.expert_replicas // plan.expert_shards,
    }
    for axis, groups in groups_by_axis.items():
        spread = axis == "expert_replicate"
        ranks = plan.shards_of(spread=spread)
        parts = (x.layer.experts if spread else x.layer.dense for x in layers)
        nbytes = sum(part.padded_bytes(ranks, trained=True) for part in parts)
        if nbytes and groups > 1:
            sums.append(_message(rank, "all_reduce", axis, max(1, nbytes // ranks)))
    return sums


def _send(
    program: RankTasks,
    messages: Sequence[PricedOp],
    after: tuple[int, ...] | None = None,
    lane: str = "comm",
) -> list[int]:
    """Add messages to a lane of the program, after these tasks; returns their tasks."""
    program.sent += messages
    return [program.lanes.send(op, lane, after) for op in messages]


def _message(rank: Rank, kind: str, axis: str, nbytes: int) -> Message:
    """A collective of parameters (all_gather), or of gradients in the dtype they are reduced in."""
    message = Message(kind=kind, axis=axis, message_bytes=nbytes, dtype=rank.gradient_dtype)
    return message if kind == "all_gather" else rank.strategy.of_gradients(message)
