"""Builds one rank's program: micro-batches, synchronisation and optimizer, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.gradient_copies import buffer_copies
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.pricing.work import Work
from itercast.compose.simulate.data_parallel import LayerBucket, layer_buckets
from itercast.compose.simulate.fsdp import hooks, sharded_backward, sharded_forward
from itercast.compose.simulate.rank_update import RankUpdate
from itercast.microbench.ops.step.optimizer import NORM


class RankProgram(RankUpdate):
    """Adds a rank's ``forward``, ``backward`` and ``update`` in the order they are called."""

    def unsynchronised(self, micro: int) -> None:
        """Add whole micro-batches, forward and backward, without synchronisation."""
        if micro < 1:
            return
        forward, first, later = Work(), Work(), Work()
        for x in self.rank.layers:
            python = hooks(self, x, 1.0, micro) if self.strategy.by_layer else Work()
            forward = forward.then(python).then(x.forward_work)
            first = (x.later_work if self.rank.one_by_one else x.backward_work).then(first)
            later = x.later_work.then(later)
        work = forward.then(first).then(forward.then(later).times(micro - 1))
        shown = forward.steps + first.steps + (forward.steps + later.steps) * (micro - 1)
        self.lanes.work(replace(work, steps=shown), f"{micro} micro-batches")

    def forward(self, *, last: bool = True) -> None:
        """Add the forward of one micro-batch; ``last``: the last one of a step without a pipeline.

        Messages that replicas send once a step before forward are sent before that one.
        """
        gather = self.strategy.every_micro or last
        if self.strategy.broadcast and last:
            self._broadcast()
        if self.strategy.gossip and last:
            self._average()
        if self.strategy.by_layer:
            sharded_forward(self, gather=gather)
        elif "activations" in self.strategy.offload:
            for x in self.rank.layers:
                self.lanes.work(x.forward_work, f"forward {x.layer.name}")
                self.to_host(x)
        else:
            total = Work()
            for x in self.rank.layers:
                total = total.then(x.forward_work)
            self.lanes.work(total, "forward")

    def _average(self) -> None:
        """Add the average of parameters with other replicas, first layers first."""
        if self.strategy.sends < 1:
            self._over_parameters((NORM,), "norms")
        self.filled = layer_buckets(self.rank.layers, self.strategy)[::-1]
        for bucket in self.filled:
            self._copy_bucket(bucket, into=True)
            kinds = bucket.messages(self.strategy, self.rank.cluster)
            sent = self.price(kinds, 1 / self.strategy.sends)
            self.averaged += [self.lanes.send(m) for m in sent]

    def _broadcast(self) -> None:
        """Add the broadcast of running statistics from the first replica, a message per dtype."""
        for dtype, tensors in self.rank.model.graph.buffers.items():
            size = sum(t.nbytes for t in tensors)
            message = Message(kind="broadcast", axis="shard", message_bytes=size, dtype=dtype)
            join, *copies = self.rank.book.price(buffer_copies(tensors))
            self.copies += [join, *copies]
            x = self.rank.layers[0]
            self.lanes.work(x.fold([join]), "join buffers")
            self.lanes.wait([self.lanes.send(self.price([message])[0])])
            self.lanes.work(x.fold(copies), "copy buffers")

    def backward(self, *, later: bool, sync: bool) -> None:
        """Add the backward of one micro-batch; ``later``: not the step's first.

        ``sync``: full buckets are reduced while it runs; at its end they are awaited and copied
        back.
        """
        layers, later = self.rank.layers, later or self.rank.one_by_one
        if self.strategy.by_layer:
            sharded_backward(self, scatter=sync, later=later)
            return
        reduces = sync and self.strategy.reduce and not self.strategy.gossip
        filled = layer_buckets(layers, self.strategy, self.rank.starts) if reduces else []
        self.filled = filled or self.filled
        kinds = [m for b in filled for m in b.messages(self.strategy, self.rank.cluster)]
        price_messages(kinds, self.rank.book, self.rank.cluster)  # one call of the pricer
        due: dict[int, list[LayerBucket]] = {}
        for b in filled:
            due.setdefault(b.instance, []).append(b)
        reduced: list[list[int]] = []
        waiting, marker = Work(), self.lanes.done
        for i in range(len(layers) - 1, -1, -1):
            if i in self.pauses or "activations" in self.strategy.offload:
                self.lanes.work(waiting, "backward")
                self.pause(i)
                self.from_host(layers[i], marker)  # one layer ahead
                waiting, marker = Work(), self.lanes.done
            if filled:
                waiting = self._layer_backward(i, due.get(i, []), waiting, reduced, later=later)
            else:
                waiting = waiting.then(layers[i].later_work if later else layers[i].backward_work)
        self.lanes.work(waiting, "backward")
        for bucket, tasks in zip(filled, reduced, strict=True):
            self.lanes.wait(tasks)
            self._copy_bucket(bucket, into=False)

    def _layer_backward(
        self,
        i: int,
        due: Sequence[LayerBucket],
        waiting: Work,
        reduced: list[list[int]],
        *,
        later: bool,
    ) -> Work:
        """Add a layer's backward, cut where buckets fill; returns the work after the last cut.

        ``due``: the buckets that fill in layer i; ``waiting``: work of later layers that is not yet
        added; ``reduced`` gets the tasks of each bucket's messages.
        """
        x, start = self.rank.layers[i], 0
        for bucket in [*due, None]:
            stop = len(x.backward) if bucket is None else bucket.offset + 1
            ops = self._with_copies(x, start, stop, later=later)
            if bucket is None:
                return waiting.then(x.fold(ops))
            ops += self._codec(bucket, encode=True)
            in_chunks = self.strategy.chunks > 1 and len(ops) > 0
            if in_chunks:  # the last op before the bucket is full, in two parts
                part = ops[-1].duration_us / self.strategy.chunks
                rest = replace(ops[-1], duration_us=ops[-1].duration_us - part)
                ops = [*ops[:-1], replace(ops[-1], duration_us=part)]
            self.lanes.work(waiting.then(x.fold(ops)), f"backward {x.layer.name}")
            waiting, start = Work(), stop
            messages = self.price(bucket.messages(self.strategy, self.rank.cluster))
            if in_chunks:
                share = (self.strategy.chunks - 1) / self.strategy.chunks
                first = [
                    self.lanes.send(replace(m, duration_us=m.duration_us * share)) for m in messages
                ]
                self.lanes.work(x.fold([rest]), f"backward {x.layer.name}")
                messages = [replace(m, duration_us=m.duration_us * (1 - share)) for m in messages]
                reduced.append([*first, *(self.lanes.send(m) for m in messages)])
            else:
                reduced.append([self.lanes.send(m) for m in messages])
        return waiting

    def _with_copies(self, x: PricedLayer, start: int, stop: int, *, later: bool) -> list[PricedOp]:
        """Ops ``start`` to ``stop`` of backward, each with its gradients' copies after it.

        ``later``: a micro-batch after the first, which adds to gradients. Experts that only this
        rank holds are copied into no bucket.
        """
        ready: dict[int, list[PricedOp]] = {}
        for at, p in enumerate(x.layer.parameters):
            if start <= p.ready_after < stop:
                added = [x.accumulate[at]] if later else []
                alone = p.spread and self.strategy.expert_replicas == 1
                added += [] if alone else [x.into_bucket[at]] * self.strategy.copies_in
                self.copies += added
                ready.setdefault(p.ready_after, []).extend(added)
        ops: list[PricedOp] = []
        for i in range(start, stop):
            ops += [*x.backward[i : i + 1], *ready.get(i, [])]
        return ops

    def reduce_tied(self, nbytes: int) -> None:
        """Add the all_reduce of a tied weight's gradient between first and last stage."""
        pipeline = self.rank.cluster.groups["pp"]
        axis = "inter_node" if pipeline.per_node < pipeline.size else "intra_node"
        dtype = self.rank.model.graph.tied[0].dtype
        message = Message(kind="all_reduce", axis=axis, message_bytes=nbytes, dtype=dtype)
        self.lanes.wait([self.lanes.send(self.price([self.strategy.of_gradients(message)])[0])])
