"""One rank's step of a DLRM with sharded tables, in plain torch.distributed.

The order of a step: distribute inputs, look up own shards for the samples of all ranks, exchange
pooled vectors beside the bottom perceptron, interaction and top perceptron both ways, exchange
gradients beside the bottom perceptron's backward pass, update own shards, optimizer of the dense
part, which DDP replicates. Tables are updated by SGD with gradients of the rows looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from itercast.extras.lookups.embedding_bag import EmbeddingBag
from itercast.extras.lookups.random_streams import draw_stream
from itercast.extras.recommenders.models.tables_dlrm import TablesDlrm
from itercast.extras.recommenders.sharded_model import Shard, ShardedModel, Table

LEARNING_RATE = 1e-3
TABLE_OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.SparseAdam,
}


def draw_lookups(batch: int, table: Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers and starts of bags of so many samples."""
    point = EmbeddingBag(
        op="forward",
        rows=table.rows,
        dim=table.dim,
        bags=batch,
        lookups=batch * int(table.pooling),
        skew=table.stream.skew,
    )
    index, starts = draw_stream(point, "cpu")
    return index, starts


def with_copies(model: ShardedModel) -> TablesDlrm:
    """The dense part with the tables that every rank has a copy of; DDP reduces their gradients."""
    sizes = (model.features, model.bottom, len(model.tables), model.tables[0].dim, model.top)
    local = sorted({s.table for s in model.shards if s.local})
    return TablesDlrm(sizes, {t: model.tables[t].rows for t in local})


class ShardedStep:
    """The step of this rank; calling it runs one iteration."""

    def __init__(self, model: ShardedModel, group: dist.ProcessGroup | None = None) -> None:
        self.model, self.exchange = model, group
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        sharded = [s for s in model.shards if not s.local]
        self.by_rank = [[s for s in sharded if s.rank == r] for r in range(self.world)]
        self.own = self.by_rank[self.rank]
        self.weights = [nn.Parameter(torch.full((s.rows, s.columns), 0.01)) for s in self.own]
        self.net = DistributedDataParallel(with_copies(model))
        dense: Any = torch.optim.SGD if model.optimizer == "sgd" else torch.optim.AdamW
        self.optimizer = dense(self.net.parameters(), lr=LEARNING_RATE, foreach=True)
        held = self.weights or [nn.Parameter(torch.zeros(1))]  # an optimizer needs a parameter
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default, of which torch warns
        self.table_optimizer = TABLE_OPTIMIZERS[model.optimizer](held, lr=LEARNING_RATE)
        self.dense = torch.randn(model.batch, model.features)
        self.clicked = torch.randint(0, 2, (model.batch,)).float()
        self.lookups = [draw_lookups(model.batch, t) for t in model.tables]

    def __call__(self) -> None:
        """Run one iteration."""
        self.optimizer.zero_grad()
        self.table_optimizer.zero_grad()
        logits, bags, received = self.forward()
        loss = F.binary_cross_entropy_with_logits(logits, self.clicked)
        returned = _WhenAllReady(received, self._send_gradients)
        loss.backward()
        got, work = returned.result
        work.wait()
        self._update(bags, got)
        self.optimizer.step()

    def forward(self) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Logits (batch,), pooled vectors of own shards, and those received, by rank."""
        bags = self._look_up(*self._distribute_inputs())
        received, work = self._send_vectors(bags)
        logits = self.net(self.dense, self.lookups, lambda: self._pooled(received, work))
        return logits, bags, received

    def _distribute_inputs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Send row numbers to the shards' ranks; row numbers and bag lengths by own shard."""
        lengths, values, sizes = [], [], []
        for shards in self.by_rank:
            parts = [self._of_shard(s) for s in shards]
            values += [index for index, _ in parts]
            lengths += [length for _, length in parts]
            sizes.append(sum(len(index) for index, _ in parts))
        batch, own = self.model.batch, len(self.own)
        sent = torch.cat(lengths) if lengths else torch.empty(0, dtype=torch.int64)
        got = torch.empty(self.world * own * batch, dtype=torch.int64)
        counts = [len(s) * batch for s in self.by_rank]
        dist.all_to_all_single(got, sent, [own * batch] * self.world, counts, group=self.exchange)
        got = got.view(self.world, own, batch)
        by_source = got.sum(dim=2)
        arriving = by_source.sum(dim=1).tolist()
        index = torch.empty(int(sum(arriving)), dtype=torch.int64)
        whole = torch.cat(values) if values else torch.empty(0, dtype=torch.int64)
        dist.all_to_all_single(index, whole, arriving, sizes, group=self.exchange)
        pieces = index.split(by_source.flatten().tolist())
        rows = [torch.cat(pieces[i::own]) for i in range(own)] if own else []
        return rows, [got[:, i].reshape(-1) for i in range(own)]

    def _of_shard(self, s: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers within a shard and the lengths of bags, of this rank's samples."""
        index, starts = self.lookups[s.table]
        ends = torch.cat((starts[1:], torch.tensor([len(index)])))
        if s.rows == self.model.tables[s.table].rows:
            return index, ends - starts
        inside = (index >= s.first_row) & (index < s.first_row + s.rows)
        before = F.pad(inside.cumsum(0), (1, 0))
        return index[inside] - s.first_row, before[ends] - before[starts]

    def _look_up(self, rows: list[torch.Tensor], lengths: list[torch.Tensor]) -> list[torch.Tensor]:
        """Pooled vectors (ranks * batch, columns) of each own shard."""
        bags = []
        for weight, index, length in zip(self.weights, rows, lengths, strict=True):
            starts = length.cumsum(0) - length
            bags.append(F.embedding_bag(index, weight, starts, mode="sum", sparse=True))
        return bags

    def _send_vectors(self, bags: list[torch.Tensor]) -> tuple[list[torch.Tensor], dist.Work]:
        """Start the exchange; its vectors (batch, columns of shards) by rank, and its handle."""
        batch, dtype = self.model.batch, torch.float32
        with torch.no_grad():
            sent = torch.cat(bags, dim=1) if bags else torch.empty(self.world * batch, 0)
        columns = [sum(s.columns for s in shards) for shards in self.by_rank]
        sizes = [batch * c for c in columns]
        got = torch.empty(sum(sizes), dtype=dtype)
        mine = [batch * sent.shape[1]] * self.world
        work = dist.all_to_all_single(
            got, sent.flatten(), sizes, mine, group=self.exchange, async_op=True
        )
        received = [part.view(batch, c) for part, c in zip(got.split(sizes), columns, strict=True)]
        return received, work

    def _pooled(self, received: list[torch.Tensor], work: dist.Work) -> dict[int, torch.Tensor]:
        """Vectors (batch, dim) by table: columns joined, parts of rows added."""
        work.wait()
        for part in received:
            part.requires_grad_()
        parts: dict[int, dict[int, list[torch.Tensor]]] = {}
        for shards, block in zip(self.by_rank, received, strict=True):
            split = block.split([s.columns for s in shards], dim=1) if shards else ()
            for s, one in zip(shards, split, strict=True):
                parts.setdefault(s.table, {}).setdefault(s.first_column, []).append(one)
        return {
            table: _join([_add(some) for _, some in sorted(columns.items())])
            for table, columns in parts.items()
        }

    def _send_gradients(self, gradients: list[torch.Tensor]) -> tuple[torch.Tensor, dist.Work]:
        """Start the exchange back; gradients (ranks * batch, own columns), and its handle."""
        batch = self.model.batch
        columns = sum(s.columns for s in self.own)
        got = torch.empty(self.world * batch, columns)
        sent = torch.cat([g.flatten() for g in gradients])
        sizes = [g.numel() for g in gradients]
        mine = [batch * columns] * self.world
        work = dist.all_to_all_single(
            got.view(-1), sent, mine, sizes, group=self.exchange, async_op=True
        )
        return got, work

    def _update(self, bags: list[torch.Tensor], got: torch.Tensor) -> None:
        """Update own shards with the gradients (ranks * batch, own columns) of pooled vectors."""
        if bags:
            parts = got.split([s.columns for s in self.own], dim=1)
            torch.autograd.backward(bags, [p.contiguous() for p in parts])
            self.table_optimizer.step()


class _WhenAllReady:
    """Calls a function with the gradients of some tensors as soon as all of them are computed."""

    def __init__(
        self, tensors: list[torch.Tensor], then: Callable[[list[torch.Tensor]], Any]
    ) -> None:
        self.gradients = [torch.zeros_like(t) for t in tensors]
        self.then = then
        self.result: Any = None
        wanted = [i for i, t in enumerate(tensors) if t.numel()]
        self.missing = len(wanted)
        for i in wanted:
            tensors[i].register_hook(self._hook(i))
        if not wanted:
            self.result = then(self.gradients)

    def _hook(self, at: int) -> Callable[[torch.Tensor], None]:
        """The hook of tensor ``at``: the last one to be called calls ``then``."""

        def ready(gradient: torch.Tensor) -> None:
            self.gradients[at] = gradient
            self.missing -= 1
            if not self.missing:
                self.result = self.then(self.gradients)

        return ready


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _add(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)
