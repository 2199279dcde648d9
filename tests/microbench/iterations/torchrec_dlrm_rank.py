"""One rank of sharded DLRMs: a step of ours and one by torchrec from the same weights and inputs.

Saves logits before the step and tables after it, as [ours, torchrec's].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.comm_ops import set_gradient_division

from itercast.microbench.iterations.sharded_dlrm import ShardedStep
from itercast.microbench.iterations.sharded_model import ShardedModel, model_of
from itercast.microbench.iterations.torchrec_dlrm import TorchrecStep, jagged, name_of

Part = tuple[tuple[int, int, int], torch.Tensor]  # table, first row and column; numbers


def shards_of_ours(step: ShardedStep) -> list[Part]:
    """What this rank has of the tables."""
    held = [(s.table, s.first_row, s.first_column) for s in step.own]
    local = [((int(t), 0, 0), bag.weight) for t, bag in step.net.module.copies.items()]
    return [*zip(held, step.weights, strict=True), *local]


def shards_of_torchrec(step: TorchrecStep) -> list[Part]:
    """The same of torchrec's state."""
    found = []
    state = step.net.state_dict()
    for i in range(len(step.model.tables)):
        weight = state[f"tables.embedding_bags.{name_of(i)}.weight"]
        if not isinstance(weight, ShardedTensor):
            found.append(((i, 0, 0), weight))
            continue
        for shard in weight.local_shards():
            found.append(((i, *shard.metadata.shard_offsets), shard.tensor))
    return found


def fill(parts: list[Part], tables: list[torch.Tensor]) -> None:
    """Give shards the numbers of whole tables."""
    with torch.no_grad():
        for (table, row, column), part in parts:
            rows, columns = part.shape
            part.copy_(tables[table][row : row + rows, column : column + columns])


def run_steps(model: ShardedModel, path: Path) -> None:
    """Run one step of both; inputs differ between ranks, weights do not."""
    torch.manual_seed(0)
    tables = [torch.randn(t.rows, t.dim) for t in model.tables]
    ours, theirs = ShardedStep(model, dist.new_group()), TorchrecStep(model)
    fill(shards_of_ours(ours), tables)
    fill(shards_of_torchrec(theirs), tables)
    dense = [p for n, p in theirs.net.named_parameters() if n.startswith("dense.")]
    with torch.no_grad():
        for p, q in zip(ours.net.module.dense.parameters(), dense, strict=True):
            q.copy_(p)
    theirs.dense, theirs.clicked = ours.dense, ours.clicked
    theirs.lookups = jagged(ours.lookups)
    logits = [ours.forward()[0].detach(), theirs.forward().detach()]
    ours()
    theirs()
    both = [dict(shards_of_ours(ours)), dict(shards_of_torchrec(theirs))]
    tensors = [{key: part.detach() for key, part in some.items()} for some in both]
    torch.save({"before": tables, "logits": logits, "tables": tensors}, path)


def main(folder: Path) -> None:
    """Run every model of ``orders.json``, one after the other."""
    dist.init_process_group("gloo")
    set_gradient_division(False)  # of sharded tables: added over ranks, as ours
    orders: dict[str, Any] = json.loads((folder / "orders.json").read_text())
    for name, order in orders.items():
        run_steps(model_of(order), folder / f"{name} {dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
