"""Two ranks of sharded DLRMs whose weights both know: each runs a step, saves what it computed."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once: each fork would import it
import torch.distributed as dist

from itercast.capture.base.yaml_text import made_of
from itercast.extras.recommenders.sharded_dlrm import ShardedStep, draw_lookups
from itercast.extras.recommenders.sharded_model import ShardedModel


def run_step(order: dict[str, Any], path: Path) -> None:
    """Run one step of a model, save it to ``path``; inputs differ between ranks, weights do not."""
    torch.manual_seed(0)
    tables = [torch.randn(t["rows"], t["dim"]) for t in order["tables"]]
    step = ShardedStep(made_of(ShardedModel, order, "order"), dist.new_group())
    torch.manual_seed(1)
    with torch.no_grad():
        for p in step.net.parameters():
            p.copy_(torch.randn_like(p))
        for number, copy in step.net.module.copies.items():
            copy.weight.copy_(tables[int(number)])
        for s, weight in zip(step.own, step.weights, strict=True):
            rows = tables[s.table][s.first_row : s.first_row + s.rows]
            weight.copy_(rows[:, s.first_column : s.first_column + s.columns])
    torch.manual_seed(2 + dist.get_rank())
    step.lookups = [draw_lookups(step.model.batch, t) for t in step.model.tables]
    step.dense = torch.randn_like(step.dense)
    dense = {k: v.clone() for k, v in step.net.module.dense.state_dict().items()}
    logits = step.forward()[0].detach()
    step()
    local = [(t, copy.weight) for t, copy in step.net.module.copies.items()]
    whole = {"first_row": 0, "first_column": 0}
    shards = [
        ({"table": int(t), **whole, "rows": len(w), "columns": w.shape[1]}, w) for t, w in local
    ]
    names = ("table", "first_row", "rows", "first_column", "columns")
    for s, weight in zip(step.own, step.weights, strict=True):
        shards.append(({name: getattr(s, name) for name in names}, weight))
    torch.save(
        {
            "tables": tables,
            "dense": dense,
            "inputs": step.dense,
            "clicked": step.clicked,
            "lookups": step.lookups,
            "logits": logits,
            "shards": [(s, w.detach()) for s, w in shards],
        },
        path,
    )


def main(folder: Path, rank: int) -> None:
    """Run every model of ``orders.json``, one after the other."""
    group = f"file://{folder.absolute()}/group"
    dist.init_process_group("gloo", init_method=group, rank=rank, world_size=2)
    for name, order in json.loads((folder / "orders.json").read_text()).items():
        run_step(order, folder / f"{name} {dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    other = os.fork()  # it need not import torch again
    main(Path(sys.argv[1]), int(other == 0))
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
