"""A rank's update: the optimizer's calls, the messages after them, averages every few steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from itercast.capture.opcall import ITEMSIZE_BYTES, ParamSpec
from itercast.capture.step import update_event
from itercast.compose.pricing.collectives import Message
from itercast.compose.pricing.host import host_cost, host_work, on_host
from itercast.compose.pricing.optimizer import (
    AFTER_AVERAGE,
    BEFORE_AVERAGE,
    fused_update,
    one_by_one,
    outer_update,
    scaled_update,
    state_bytes,
    state_copies,
    update_bytes,
)
from itercast.compose.pricing.priced_op import AssumedTime, Priceable, PricedOp, priceable
from itercast.compose.pricing.work import Step, Work, fold
from itercast.compose.simulate.data_parallel import PRECISE, LayerBucket, layer_buckets
from itercast.compose.simulate.fsdp import sharded_bytes, summed_shares
from itercast.compose.simulate.rank import Rank, RankTasks
from itercast.microbench.ops.step.optimizer import UNSCALE


class RankUpdate(RankTasks):
    """Adds a rank's ``update`` after its gradients are summed."""

    def _codec(self, bucket: LayerBucket, *, encode: bool) -> list[PricedOp]:
        """The kernels that encode a bucket, or decode it."""
        encoding, decoding = bucket.coded(self.strategy, self.rank.cluster)
        calls = encoding if encode else decoding
        ops = self.rank.book.price([priceable(c) for c in calls]) if calls else []
        self.copies += ops
        return ops

    def _copy_bucket(self, bucket: LayerBucket, *, into: bool) -> None:
        """Add the copies of gradients ``into`` a bucket, or out of it once it is decoded."""
        layers, work = self.rank.layers, Work()
        every = max(1, self.strategy.every) / self.strategy.sends
        times = self.strategy.copies_in if into else self.strategy.copies_out
        if not into:
            decode = self._codec(bucket, encode=False)
            work = layers[bucket.instance].fold(decode)
        for i, at in bucket.members:
            ops = [(layers[i].into_bucket if into else layers[i].out_of_bucket)[at]] * times
            self.copies += [op.over(every) for op in ops]
            work = work.then(layers[i].fold(ops))
        self.lanes.work(work.over(every), "into bucket" if into else "out of bucket")

    def unscale(self, optimizer: str) -> None:
        """Add what a GradScaler does before the optimizer's step, as under autocast in fp16.

        It divides all gradients by its scale and notes whether one is not finite, which the host
        waits for. Source: torch/amp/grad_scaler.py, ``_unscale_grads_`` and ``_maybe_opt_step``.
        """
        if self.rank.scales_loss(optimizer):
            self._over_parameters((UNSCALE,), "unscale gradients", dtype=PRECISE)
            if self.rank.awaits_scale(optimizer):
                x = self.rank.layers[0]
                read = Step(0.0, x.launches.alone_us, name="read by the host", waits=True)
                self.lanes.work(fold([read], x.on_cpu, shown=x.shown), "wait for gradients")

    def update(self, optimizer: str) -> None:
        """Add what comes after backward: the optimizer's step on gradients in their own scale."""
        self.unscale(optimizer)
        self.step(optimizer)

    def step(self, optimizer: str) -> None:
        """Add the optimizer and the messages after it; offloaded state moves over PCIe."""
        rank = self.rank
        if self.averaged:
            self.lanes.wait(self.averaged)
            for bucket in self.filled:
                self._copy_bucket(bucket, into=False)
        trained = [p for x in rank.layers for p in x.layer.trained]
        tensors = len(trained)
        if "parameters" in self.strategy.offload:
            self._update_on_host(optimizer, trained)
            return
        ops = rank.book.price(self.own_update())
        self.updates += ops
        self._count_launches(ops)
        state = self._own(trained, partial(state_bytes, optimizer))
        offloaded = "optimizer" in self.strategy.offload and state
        if offloaded:
            self.lanes.wait([self.lanes.send(self.host_copy(state, "h2d"), "h2d")])
        if trained or ops:
            python_us = self._python_of_update(optimizer, tensors)
            self.lanes.work(_update_work(ops, rank, python_us), "optimizer")
            self._update_matrices([p for p in trained if p.matrix])
        if offloaded:
            self.lanes.wait([self.lanes.send(self.host_copy(state, "d2h"), "d2h")])
        after_update = self.strategy.after_update
        kinds = [b.message(k, self.strategy) for b in self.filled for k in after_update]
        self.lanes.wait([self.lanes.send(m) for m in self.price([*kinds, *self.regathered()])])
        self._average_copies(optimizer)

    def _count_launches(self, ops: Sequence[PricedOp]) -> None:
        """Note the host's time of an optimizer's loop over parameters, which is not captured."""
        if self.rank.one_by_one:
            launches, launched = self.rank.layers[0].launches, AssumedTime()
            for op in ops:
                launched.add_us(launches.us(op, added=True), launches.launch_assumed)
            self.copies.append(host_work(launched))

    def _python_of_update(self, optimizer: str, tensors: int) -> float:
        """Host time in us of the optimizer's Python over tensors; over shards more, by DTensor."""
        rank = self.rank
        python_us = rank.model.optimizer_host_us * tensors / max(1, rank.model.optimizer_tensors)
        if not self.strategy.by_layer:
            return python_us
        self.copies.append(host_cost({update_event(optimizer, "dtensor_step"): tensors}, rank.book))
        return python_us + self.copies[-1].duration_us

    def _update_on_host(self, optimizer: str, trained: Sequence[ParamSpec]) -> None:
        """Add the step of an optimizer on the host, once gradients were copied there."""
        if any(p.matrix for p in trained):
            plan = str(self.rank.plan)
            raise ValueError(f"plan {plan!r}: Muon's products are a GPU's, not a host's")
        python_us = self._python_of_update(optimizer, len(trained))
        op = on_host("optimizer on the CPU", update_bytes(self.own_update()), self.rank.cluster)
        self.updates.append(op)
        self.lanes.on_host(replace(op, duration_us=op.duration_us + python_us), self.copied[-1:])

    def own_update(self) -> list[Priceable]:
        """The optimizer's calls for the rank's part of all parameters, without Muon's matrices."""
        model = self.rank.model
        tables = list(model.graph.tables) if model.has_tables(self.rank.layers[0]) else []
        trained = [p for x in self.rank.layers for p in x.layer.trained]
        if not (others := [p for p in trained if not p.matrix]):
            return tables
        if self.rank.one_by_one:
            sizes = [p.nbytes // ITEMSIZE_BYTES[p.dtype] for p in others]
            return [*tables, *one_by_one(model.graph.capture, sizes, self.rank.book.gpu)]
        numel = self._own(others, lambda of: sum(p.nbytes // ITEMSIZE_BYTES[p.dtype] for p in of))
        wanted = [*tables, *scaled_update(model.graph.optimizer, max(1, numel), len(others))]
        optimizer = model.graph.capture.optimizer
        if self.strategy.fused_update and (len(others) < len(trained) or "+" in optimizer):
            plan = str(self.rank.plan)
            raise ValueError(f"plan {plan!r}: the calls of {optimizer} fit in no fused kernel")
        return fused_update(wanted) if self.strategy.fused_update else wanted

    def regathered(self) -> list[Message]:
        """What a pipeline's rank under ZeRO 1 gathers after the update: parameters kept whole."""
        if not self.strategy.by_layer or self.strategy.every_micro or self.rank.plan.pp == 1:
            return []
        gathered = sharded_bytes(self.rank.layers, self.rank).items()
        return [Message(kind="all_gather", axis=on, message_bytes=n) for on, n in gathered]

    def _own(
        self, parameters: Sequence[ParamSpec], count: Callable[[Sequence[ParamSpec]], int]
    ) -> int:
        """``count`` of the parameters that a rank updates: each group over the ranks sharing it."""
        plan, total = self.rank.plan, 0
        for spread in (False, True):
            ranks = plan.shards_of(spread=spread) if self.strategy.share_update else 1
            total += count([p for p in parameters if p.spread == spread]) // ranks
        return total

    def _update_matrices(self, matrices: Sequence[ParamSpec]) -> None:
        """Add Muon's updates, each rank's share (``itercast.compose.pricing.optimizer``).

        Matrices are on their way while a rank multiplies those that it has.
        """
        known, fold = self.rank.model.graph.matrices, self.rank.layers[0].fold
        ranks = self.rank.plan.shards if self.strategy.share_update else 1
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
        """Add averages of parameters or tables, made every few steps, by their mean time per step.

        Nothing of the next step overlaps it, so that times of steps with and without it add up.
        """
        plan, every = self.rank.plan, self.strategy.every
        sharded = self.strategy.by_layer
        filled = layer_buckets(self.rank.layers, self.strategy) if every and not sharded else []
        messages = [b.message("all_reduce", self.strategy) for b in filled]
        if every and sharded:
            messages += summed_shares(self.rank.layers, self.rank)
        messages += self._averaged_tables(optimizer)
        if self.strategy.outer:
            self._over_parameters(BEFORE_AVERAGE, "outer optimizer", self.strategy.every)
        sent = list[int]()
        for i, message in enumerate(self.price(messages, max(1, plan.local))):
            if i < len(filled):
                self._copy_bucket(filled[i], into=True)
            sent.append(self.lanes.send(message))
        self.lanes.wait(sent)
        for bucket in filled:
            self._copy_bucket(bucket, into=False)
        if self.strategy.outer:
            self._over_parameters(AFTER_AVERAGE, "outer optimizer", self.strategy.every)

    def _over_parameters(
        self, calls: Sequence[str], name: str, every: float = 1, dtype: str = ""
    ) -> None:
        """Add calls over all parameters that the rank trains, made once in ``every`` steps."""
        layers, shards = self.rank.layers, self.rank.plan.shards if self.strategy.by_layer else 1
        trained = [p for x in layers for p in x.layer.trained]
        if not trained:
            return
        numel = max(1, sum(x.layer.trained_numel for x in layers) // shards)
        wanted = outer_update(calls, numel, len(trained), dtype or trained[0].dtype)
        ops = self.rank.book.price(list(wanted))
        self.updates += [op.over(every) for op in ops]
        self.lanes.work(layers[0].fold(ops).over(every), name)

    def _averaged_tables(self, optimizer: str) -> list[Message]:
        """The average of the fullest rank's tables and their state over ranks that have the same.

        As torchrec's DMPCollection.sync sends it after the optimizer.
        """
        rank = self.rank
        tables = [p for x in rank.layers for p in x.layer.parameters if p.local]
        of_fullest = rank.model.added_to(rank.layers[0]).get("parameters", 0)
        held_bytes = sum(p.nbytes for p in tables) + of_fullest
        if rank.plan.table_ranks == rank.plan.stage_ranks or not held_bytes:
            return []
        size = held_bytes * (1 + state_copies(optimizer))
        return [Message(kind="all_reduce", axis="table_replicas", message_bytes=size)]


def _update_work(ops: Sequence[PricedOp], rank: Rank, python_us: float) -> Work:
    """The optimizer's Python, then its ops; in a loop, each op has its launch's time instead."""
    layer, python = rank.layers[0], [Step(0.0, python_us, name="optimizer's Python")]
    first = fold(python if python_us else (), layer.on_cpu, shown=layer.shown)
    if not rank.one_by_one:
        return first.then(layer.fold(ops))
    steps = [layer.launches.step(op, added=True) for op in ops]
    return first.then(fold(steps, layer.on_cpu, shown=layer.shown))
