"""One rank's step of a DLRM whose tables torchrec's DistributedModelParallel shards.

Model, batch and placements are those of ``sharded_dlrm``. FBGEMM looks all shards of a rank up in
one call and updates them while it computes their gradients; on a CPU by SGD or Adagrad only.
torchrec averages gradients of sharded tables over ranks, where ``sharded_dlrm`` adds them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from itercast.microbench.iterations.sharded_dlrm import LEARNING_RATE, draw_lookups, with_copies
from itercast.microbench.iterations.sharded_model import Shard, ShardedModel

TABLE_OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
CPU = torch.device("cpu")


class TorchrecDlrm(nn.Module):
    """A DLRM with its tables in torchrec's collection, which is not allocated yet."""

    def __init__(self, model: ShardedModel) -> None:
        super().__init__()
        self.dense = with_copies(replace(model, shards=()))
        configs = [
            EmbeddingBagConfig(
                name=name_of(i),
                feature_names=[name_of(i)],
                num_embeddings=t.rows,
                embedding_dim=t.dim,
                pooling=PoolingType.SUM,
            )
            for i, t in enumerate(model.tables)
        ]
        self.tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, dense: torch.Tensor, lookups: KeyedJaggedTensor) -> torch.Tensor:
        """(batch, features) and lookups of all tables to (batch,) logits.

        Pooled vectors are waited for after the bottom perceptron.
        """
        waiting = self.tables(lookups)

        def pooled() -> dict[int, torch.Tensor]:
            found = waiting.to_dict()
            return {i: found[name_of(i)] for i in range(len(found))}

        logits: torch.Tensor = self.dense(dense, (), pooled)
        return logits


class TorchrecStep:
    """The step of this rank; calling it runs one iteration, of one stage (``stages_us``)."""

    def __init__(self, model: ShardedModel) -> None:
        if model.optimizer not in TABLE_OPTIMIZERS:
            allowed = ", ".join(TABLE_OPTIMIZERS)
            raise ValueError(f"optimizer {model.optimizer!r}: FBGEMM on a CPU has {allowed}")
        self.model = model
        net = TorchrecDlrm(model)
        by_table = [[s for s in model.shards if s.table == i] for i in range(len(model.tables))]
        for i, shards in enumerate(by_table):
            if not shards[0].local:
                weights = net.tables.embedding_bags[name_of(i)].parameters()
                how = TABLE_OPTIMIZERS[model.optimizer]
                apply_optimizer_in_backward(how, weights, {"lr": LEARNING_RATE})
        plan = EmbeddingModuleShardingPlan()
        plan.update({name_of(i): _sharding(shards) for i, shards in enumerate(by_table)})
        self.net = DistributedModelParallel(
            net,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
            plan=ShardingPlan({"tables": plan}),
            sharders=[EmbeddingBagCollectionSharder()],
        )
        whole = [p for n, p in self.net.named_parameters() if n not in self._sharded(by_table)]
        dense = torch.optim.SGD if model.optimizer == "sgd" else torch.optim.AdamW
        self.optimizer = dense(whole, lr=LEARNING_RATE)
        self.stages_us: list[float] = []
        self.dense = torch.randn(model.batch, model.features)
        self.clicked = torch.randint(0, 2, (model.batch,)).float()
        self.lookups = jagged([draw_lookups(model.batch, t) for t in model.tables])

    def _sharded(self, by_table: Sequence[Sequence[Shard]]) -> set[str]:
        """Names of the parameters that FBGEMM updates."""
        cut = [i for i, shards in enumerate(by_table) if not shards[0].local]
        return {f"tables.embedding_bags.{name_of(i)}.weight" for i in cut}

    def forward(self) -> torch.Tensor:
        """Logits (batch,)."""
        logits: torch.Tensor = self.net(self.dense, self.lookups)
        return logits

    def __call__(self) -> None:
        """Run one iteration."""
        began_ns = time.perf_counter_ns()
        self.optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(self.forward(), self.clicked).backward()
        self.optimizer.step()
        self.stages_us = [(time.perf_counter_ns() - began_ns) / 1e3]


def name_of(table: int) -> str:
    """The name of a table and of its lookups."""
    return f"t{table}"


def jagged(lookups: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> KeyedJaggedTensor:
    """Row numbers and starts of bags of all tables, in torchrec's form."""
    ends = [torch.cat((starts[1:], torch.tensor([len(index)]))) for index, starts in lookups]
    return KeyedJaggedTensor(
        keys=[name_of(i) for i in range(len(lookups))],
        values=torch.cat([index for index, _ in lookups]),
        lengths=torch.cat([e - starts for e, (_, starts) in zip(ends, lookups, strict=True)]),
    )


def _sharding(shards: Sequence[Shard]) -> ParameterSharding:
    """Placement of one table in torchrec's words, by what its shards have cut."""
    ranks = [s.rank for s in shards]
    if shards[0].local:
        return ParameterSharding("data_parallel", "dense", ranks)
    metadata = [
        ShardMetadata([s.first_row, s.first_column], [s.rows, s.columns], f"rank:{s.rank}/cpu")
        for s in shards
    ]
    return ParameterSharding(_kind(shards), "fused", ranks, EnumerableShardingSpec(metadata))


def _kind(shards: Sequence[Shard]) -> str:
    cut_rows, cut_columns = (
        len({getattr(s, n) for s in shards}) > 1 for n in ("first_row", "first_column")
    )
    if cut_rows and cut_columns:
        raise ValueError("torchrec's step takes tables cut by rows or by columns, not by both")
    return "row_wise" if cut_rows else "column_wise" if cut_columns else "table_wise"
