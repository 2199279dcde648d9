"""Builds one rank's program: micro-batches, synchronisation and optimizer, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from itercast.capture.opcall import ITEMSIZE_BYTES, ParamSpec
from itercast.capture.step import update_event
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.gradient_copies import buffer_copies
from itercast.compose.pricing.host import host_cost, on_host
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.pricing.optimizer import (
    AFTER_AVERAGE,
    BEFORE_AVERAGE,
    STATE_COPIES,
    fused_update,
    outer_update,
    scaled_update,
    state_bytes,
    update_bytes,
)
from itercast.compose.pricing.priced_op import Priceable, PricedOp, priceable
from itercast.compose.pricing.work import Step, Work, fold
from itercast.compose.simulate.data_parallel import LayerBucket, layer_buckets
from itercast.compose.simulate.fsdp import (
    hooks,
    sharded_backward,
    sharded_bytes,
    sharded_forward,
    summed_shares,
)
from itercast.compose.simulate.rank import Rank, RankTasks
from itercast.microbench.ops.step.optimizer import NORM


class RankProgram(RankTasks):
    """Adds a rank's ``forward``, ``backward`` and ``update`` in the order they are called."""

    def unsynchronised(self, micro: int) -> None:
        """Add whole micro-batches, forward and backward, without synchronisation."""
        if micro < 1:
            return
        forward, first, later = Work(), Work(), Work()
        for x in self.rank.layers:
            python = hooks(self, x, 1.0, micro) if self.how.by_layer else Work()
            forward = forward.then(python).then(x.forward_work)
            first = x.backward_work.then(first)
            later = x.later_work.then(later)
        work = forward.then(first).then(forward.then(later).times(micro - 1))
        shown = forward.steps + first.steps + (forward.steps + later.steps) * (micro - 1)
        self.lanes.work(replace(work, steps=shown), f"{micro} micro-batches")

    def forward(self, *, last: bool = True) -> None:
        """Add the forward of one micro-batch; ``last``: the last one of a step without a pipeline.

        Messages that replicas send once a step before forward are sent before that one.
        """
        gather = self.how.every_micro or last
        if self.how.broadcast and last:
            self._broadcast()
        if self.how.early and last:
            self._average()
        if self.how.by_layer:
            sharded_forward(self, gather=gather)
        elif "activations" in self.how.offload:
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
        if self.how.sends < 1:
            self._over_parameters((NORM,), "norms")
        self.filled = layer_buckets(self.rank.layers, self.how)[::-1]
        for bucket in self.filled:
            self._copy_bucket(bucket, into=True)
            kinds = bucket.messages(self.how, self.rank.where)
            sent = self.price(kinds, 1 / self.how.sends)
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

        ``sync``: full buckets are reduced beside it, awaited and copied back at its end.
        """
        layers = self.rank.layers
        if self.how.by_layer:
            sharded_backward(self, scatter=sync, later=later)
            return
        reduces = sync and self.how.reduce and not self.how.early
        filled = layer_buckets(layers, self.how, self.rank.starts) if reduces else []
        self.filled = filled or self.filled
        kinds = [m for b in filled for m in b.messages(self.how, self.rank.where)]
        price_messages(kinds, self.rank.book, self.rank.where)  # one call of the pricer
        due: dict[int, list[LayerBucket]] = {}
        for b in filled:
            due.setdefault(b.instance, []).append(b)
        reduced: list[list[int]] = []
        waiting, marker = Work(), self.lanes.done
        for i in range(len(layers) - 1, -1, -1):
            if i in self.pauses or "activations" in self.how.offload:
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
            in_chunks = self.how.chunks > 1 and len(ops) > 0
            if in_chunks:  # the last op before the bucket is full, in two parts
                part = ops[-1].duration_us / self.how.chunks
                rest = replace(ops[-1], duration_us=ops[-1].duration_us - part)
                ops = [*ops[:-1], replace(ops[-1], duration_us=part)]
            self.lanes.work(waiting.then(x.fold(ops)), f"backward {x.layer.name}")
            waiting, start = Work(), stop
            messages = self.price(bucket.messages(self.how, self.rank.where))
            if in_chunks:
                share = (self.how.chunks - 1) / self.how.chunks
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
        """Ops of backward from ``start`` to ``stop``, each gradient's copies after it is ready.

        ``later``: of a micro-batch that is not the step's first, and so adds to the gradients. What
        expert parallelism spreads and no other rank has is sent nowhere, and fills no bucket.
        """
        ready: dict[int, list[PricedOp]] = {}
        for at, p in enumerate(x.layer.parameters):
            if start <= p.ready_after < stop:
                added = [x.accumulate[at]] if later else []
                alone = p.spread and self.how.expert_replicas == 1
                added += [] if alone else [x.into_bucket[at]] * self.how.copies_in
                self.copies += added
                ready.setdefault(p.ready_after, []).extend(added)
        ops: list[PricedOp] = []
        for i in range(start, stop):
            ops += [*x.backward[i : i + 1], *ready.get(i, [])]
        return ops

    def _codec(self, bucket: LayerBucket, *, encode: bool) -> list[PricedOp]:
        """The kernels that encode a bucket, or decode it."""
        encoding, decoding = bucket.coded(self.how, self.rank.where)
        calls = encoding if encode else decoding
        ops = self.rank.book.price([priceable(c) for c in calls]) if calls else []
        self.copies += ops
        return ops

    def _copy_bucket(self, bucket: LayerBucket, *, into: bool) -> None:
        """Add the copies of gradients ``into`` a bucket, or out of it once it is decoded."""
        layers, work = self.rank.layers, Work()
        every = max(1, self.how.every) / self.how.sends
        times = self.how.copies_in if into else self.how.copies_out
        if not into:
            decode = self._codec(bucket, encode=False)
            work = layers[bucket.instance].fold(decode)
        for i, at in bucket.members:
            ops = [(layers[i].into_bucket if into else layers[i].out_of_bucket)[at]] * times
            self.copies += [op.over(every) for op in ops]
            work = work.then(layers[i].fold(ops))
        self.lanes.work(work.over(every), "into bucket" if into else "out of bucket")

    def reduce_tied(self, nbytes: int) -> None:
        """Add the all_reduce of a tied weight's gradient between first and last stage."""
        pipeline = self.rank.where.groups["pp"]
        axis = "inter_node" if pipeline.per_node < pipeline.size else "intra_node"
        dtype = self.rank.model.graph.tied[0].dtype
        message = Message(kind="all_reduce", axis=axis, message_bytes=nbytes, dtype=dtype)
        self.lanes.wait([self.lanes.send(self.price([self.how.of_gradients(message)])[0])])

    def update(self, optimizer: str) -> None:
        """Add the optimizer and the messages after it; offloaded state moves over PCIe."""
        rank = self.rank
        if self.averaged:
            self.lanes.wait(self.averaged)
            for bucket in self.filled:
                self._copy_bucket(bucket, into=False)
        trained = [p for x in rank.layers for p in x.layer.trained]
        tensors = len(trained)
        if "parameters" in self.how.offload:
            self._update_on_host(optimizer, trained)
            return
        ops = rank.book.price(self.own_update())
        self.updates += ops
        state = self._own(trained, partial(state_bytes, optimizer))
        offloaded = "optimizer" in self.how.offload and state
        if offloaded:
            self.lanes.wait([self.lanes.send(self.host_copy(state, "h2d"), "h2d")])
        if trained or ops:
            python_us = self._python_of_update(optimizer, tensors)
            self.lanes.work(_update_work(ops, rank, python_us), "optimizer")
            self._update_matrices([p for p in trained if p.matrix])
        if offloaded:
            self.lanes.wait([self.lanes.send(self.host_copy(state, "d2h"), "d2h")])
        kinds = [b.message(k, self.how) for b in self.filled for k in self.how.after_update]
        self.lanes.wait([self.lanes.send(m) for m in self.price([*kinds, *self.regathered()])])
        self._average_copies(optimizer)

    def _python_of_update(self, optimizer: str, tensors: int) -> float:
        """Host time in us of the optimizer's Python over tensors; over shards more, by DTensor."""
        rank = self.rank
        python_us = rank.model.optimizer_host_us * tensors / max(1, rank.model.optimizer_tensors)
        if not self.how.by_layer:
            return python_us
        self.copies.append(host_cost({update_event(optimizer, "dtensor_step"): tensors}, rank.book))
        return python_us + self.copies[-1].duration_us

    def _update_on_host(self, optimizer: str, trained: Sequence[ParamSpec]) -> None:
        """Add the step of an optimizer on the host, once gradients were copied there."""
        if any(p.matrix for p in trained):
            plan = str(self.rank.plan)
            raise ValueError(f"plan {plan!r}: Muon's products are a GPU's, not a host's")
        python_us = self._python_of_update(optimizer, len(trained))
        op = on_host("optimizer on the CPU", update_bytes(self.own_update()), self.rank.where)
        self.updates.append(op)
        self.lanes.on_host(replace(op, duration_us=op.duration_us + python_us), self.copied[-1:])

    def own_update(self) -> list[Priceable]:
        """The optimizer's calls over the rank's part of all parameters but Muon's matrices."""
        model = self.rank.model
        tables = list(model.graph.tables) if model.has_tables(self.rank.layers[0]) else []
        trained = [p for x in self.rank.layers for p in x.layer.trained]
        if not (others := [p for p in trained if not p.matrix]):
            return tables
        numel = self._own(others, lambda of: sum(p.nbytes // ITEMSIZE_BYTES[p.dtype] for p in of))
        wanted = [*tables, *scaled_update(model.graph.optimizer, max(1, numel), len(others))]
        if self.how.fused_update and len(others) < len(trained):
            plan = str(self.rank.plan)
            raise ValueError(f"plan {plan!r}: Muon's products fit in no fused kernel")
        return fused_update(wanted) if self.how.fused_update else wanted

    def regathered(self) -> list[Message]:
        """What a pipeline's rank under ZeRO 1 gathers after the update: parameters kept whole."""
        if not self.how.by_layer or self.how.every_micro or self.rank.plan.pp == 1:
            return []
        gathered = sharded_bytes(self.rank.layers, self.rank).items()
        return [Message(kind="all_gather", axis=on, message_bytes=n) for on, n in gathered]

    def _own(
        self, parameters: Sequence[ParamSpec], count: Callable[[Sequence[ParamSpec]], int]
    ) -> int:
        """What ``count`` counts of parameters, over the ranks that share out their update."""
        plan, total = self.rank.plan, 0
        for spread in (False, True):
            ranks = plan.shards_of(spread=spread) if self.how.share_update else 1
            total += count([p for p in parameters if p.spread == spread]) // ranks
        return total

    def _update_matrices(self, matrices: Sequence[ParamSpec]) -> None:
        """Add Muon's updates, each rank's share (``itercast.compose.pricing.optimizer``).

        Matrices are on their way while a rank multiplies those that it has.
        """
        known, fold = self.rank.model.graph.matrices, self.rank.layers[0].fold
        ranks = self.rank.plan.shards if self.how.share_update else 1
        alike: dict[tuple[object, ...], list[ParamSpec]] = {}
        for p in matrices:
            alike.setdefault((known[p.storage].shape, p.shape, p.dtype), []).append(p)
        after, rounds = Work(), list[tuple[Work, list[PricedOp], list[PricedOp]]]()
        for same in alike.values():
            update, count, turns = known[same[0].storage], len(same), -(-len(same) // ranks)
            parts = update.of_part(same[0].shape, ranks)
            first, products, last = (self.rank.book.price(calls) for calls in parts)
            self.updates += [*first, *last] * count + products * turns
            self.lanes.work(fold(first).times(count), "momenta")
            after = after.then(fold(last).times(count))
            there, back = update.messages(same[0].shape, ranks)
            if there:
                rounds += [
                    (fold(products), self.price(there), self.price(back)) for _ in range(turns)
                ]
            else:
                rounds.append((fold(products).times(turns), [], []))
        arriving = [[self.lanes.send(m) for m in there] for _, there, _ in rounds]
        returned = list[int]()
        for (products_work, _, back_ops), tasks in zip(rounds, arriving, strict=True):
            self.lanes.wait(tasks)
            self.lanes.work(products_work, "orthogonalise")
            returned += [self.lanes.send(m) for m in back_ops]
        self.lanes.wait(returned)
        self.lanes.work(after, "optimizer")

    def _average_copies(self, optimizer: str) -> None:
        """Add the average of parameters or tables every so many steps: a step's mean of it.

        Nothing of the next step overlaps it, so that times of steps with and without it add up.
        """
        plan, every = self.rank.plan, self.how.every
        filled = (
            layer_buckets(self.rank.layers, self.how) if every and not self.how.by_layer else []
        )
        messages = [b.message("all_reduce", self.how) for b in filled]
        if every and self.how.by_layer:
            messages += summed_shares(self.rank.layers, self.rank)
        messages += self._averaged_tables(optimizer)
        if self.how.outer:
            self._over_parameters(BEFORE_AVERAGE, "outer optimizer", self.how.every)
        sent = list[int]()
        for i, message in enumerate(self.price(messages, max(1, plan.local))):
            if i < len(filled):
                self._copy_bucket(filled[i], into=True)
            sent.append(self.lanes.send(message))
        self.lanes.wait(sent)
        for bucket in filled:
            self._copy_bucket(bucket, into=False)
        if self.how.outer:
            self._over_parameters(AFTER_AVERAGE, "outer optimizer", self.how.every)

    def _over_parameters(self, calls: Sequence[str], name: str, every: float = 1) -> None:
        """Add calls over all parameters that the rank trains, made every so many steps."""
        layers, shards = self.rank.layers, self.rank.plan.shards if self.how.by_layer else 1
        trained = [p for x in layers for p in x.layer.trained]
        if not trained:
            return
        numel = max(1, sum(x.layer.trained_numel for x in layers) // shards)
        wanted = outer_update(calls, numel, len(trained), trained[0].dtype)
        ops = self.rank.book.price(list(wanted))
        self.updates += [op.over(every) for op in ops]
        self.lanes.work(layers[0].fold(ops).over(every), name)

    def _averaged_tables(self, optimizer: str) -> list[Message]:
        """The average of the fullest rank's tables and their state over ranks that have the same.

        As torchrec's DMPCollection.sync sends it after the optimizer.
        """
        rank = self.rank
        parameters = [p for x in rank.layers for p in x.layer.parameters if p.local]
        added = rank.model.added_to(rank.layers[0])
        held = sum(p.nbytes for p in parameters) + added.get("parameters", 0)
        if rank.plan.table_ranks == rank.plan.stage_ranks or not held:
            return []
        size = held * (1 + STATE_COPIES[optimizer])
        return [Message(kind="all_reduce", axis="table_replicas", message_bytes=size)]


def _update_work(ops: Sequence[PricedOp], rank: Rank, python_us: float) -> Work:
    """The optimizer's ops after its Python."""
    layer, python = rank.layers[0], [Step(0.0, python_us, name="optimizer's Python")]
    first = fold(python if python_us else (), layer.on_cpu, shown=layer.shown)
    return first.then(layer.fold(ops))
