"""Experts behind messages: what one process does is what all ranks of the script do together."""

from pathlib import Path

import pytest
from small_scripts import captured as script
from small_scripts import written
from test_script_models import captured, found

from itercast.capture.opcall import OpCall

pytestmark = [
    pytest.mark.usefixtures("groups_end"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # names that torch changes
]
RANKS = 4
EXPERTS = """
import torch, torch.nn as nn, torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.nn.functional import all_to_all_single
dist.init_process_group("nccl")
world = dist.get_world_size()
def exchanged(counts):
    {}
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 8, bias=False)
        self.up = nn.Parameter(torch.randn(8 // world, 64, 128))
        self.down = nn.Parameter(torch.randn(8 // world, 128, 64))
    def forward(self, x):
        chosen = self.gate(x).topk(2, -1).indices.flatten()
        order = chosen.argsort()
        counts = torch.bincount(chosen, minlength=8)
        arriving = exchanged(counts)
        sent, got = (n.view(world, -1).sum(1).tolist() for n in (counts, arriving))
        rows = x[order // 2]
        rows = all_to_all_single(rows.new_empty(sum(got), 64), rows, got, sent)
        ends = arriving.view(world, -1).sum(0).cumsum(0).to(torch.int32)
        rows = torch._grouped_mm(rows.bfloat16(), self.up.bfloat16(), offs=ends)
        rows = torch._grouped_mm(rows.relu(), self.down.bfloat16(), offs=ends).float()
        back = all_to_all_single(rows.new_empty(sum(sent), 64), rows, sent, got)
        return x.index_add(0, order // 2, back)
model = nn.Sequential(Experts(), nn.Linear(64, 64, bias=False)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(100, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OWN = "return torch.stack(every).view(world, world, -1)[:, dist.get_rank()].reshape(-1)"
EXCHANGES = {  # of how many rows go to each expert, for how many come for each of one's own
    "all_to_all_single": """
    arriving = torch.zeros_like(counts)
    dist.all_to_all_single(arriving, counts)
    return arriving""",
    "all_to_all": """
    arriving = [torch.empty_like(part) for part in counts.chunk(world)]
    dist.all_to_all(arriving, list(counts.chunk(world)))
    return torch.cat(arriving)""",
    "all_gather": f"""
    every = [torch.empty_like(counts) for _ in range(world)]
    dist.all_gather(every, counts)
    {OWN}""",
    "all_gather_into_tensor": f"""
    every = counts.new_zeros(8 * world)
    dist.all_gather_into_tensor(every, counts, async_op=True).wait()
    every = every.split(8)
    {OWN}""",
    "functional": "return funcol.all_to_all_single(counts, None, None, dist.group.WORLD)",
}


def flops(calls: tuple[OpCall, ...]) -> int:
    """Two for each element of what is multiplied and each column of the result."""
    ops = ("aten.mm.default", "aten._grouped_mm.default")
    factors = [(c.args[0].shape, c.outputs[0].shape) for c in calls if c.op in ops]
    return sum(2 * a * b * out[-1] for (a, b), out in factors)


@pytest.mark.parametrize("name", EXCHANGES)
def test_ranks_together_multiply_what_one_process_does(name: str, tmp_path: Path) -> None:
    """200 rows for eight experts: 25 for each of a rank's two from each of four ranks, 200 again.

    The batch of a process is the same. A product has two passes of backward, but those that have no
    other input than the batch have one, and the gate none: experts are chosen without gradients.
    """
    text = EXPERTS.format(EXCHANGES[name].strip())
    layers = 2 * 100 * 64 * (8 + 3 * 64)
    experts = 2 * 200 * 64 * 128 * (2 + 3)
    many = script(written(tmp_path, text), gpus=RANKS)
    assert flops(many.ranks[0].calls) == layers + experts
    model, alone = found(tmp_path, text)
    assert flops(alone.ranks[0].calls) == flops(captured(model).calls) == layers + experts


GROUP_OF_ONE = """
import torch, torch.distributed as dist, torch.distributed._functional_collectives as funcol
dist.init_process_group("nccl")
KINDS = {
    "all_reduce": lambda x, y: dist.all_reduce(y.copy_(x)) or y,
    "broadcast": lambda x, y: dist.broadcast(y.copy_(x), 0) or y,
    "reduce": lambda x, y: dist.reduce(y.copy_(x), 0) or y,
    "all_gather": lambda x, y: dist.all_gather([y], x) or y,
    "all_gather_into_tensor": lambda x, y: dist.all_gather_into_tensor(y, x) or y,
    "gather": lambda x, y: dist.gather(x, [y]) or y,
    "scatter": lambda x, y: dist.scatter(y, [x]) or y,
    "reduce_scatter": lambda x, y: dist.reduce_scatter(y, [x]) or y,
    "reduce_scatter_tensor": lambda x, y: dist.reduce_scatter_tensor(y, x) or y,
    "all_to_all": lambda x, y: dist.all_to_all([y], [x]) or y,
    "all_to_all_single": lambda x, y: dist.all_to_all_single(y, x) or y,
    "all_reduce of functions": lambda x, y: funcol.all_reduce(x, "sum", [0]),
    "broadcast of functions": lambda x, y: funcol.broadcast(x, 0, [0]),
    "all_gather of functions": lambda x, y: funcol.all_gather_tensor(x, 0, [0]),
    "reduce_scatter of functions": lambda x, y: funcol.reduce_scatter_tensor(x, "sum", 0, [0]),
    "all_to_all of functions": lambda x, y: funcol.all_to_all_single(x, None, None, [0]),
    "several of functions": lambda x, y: funcol.all_reduce_coalesced([x], "sum", [0])[0],
}
class Model(torch.nn.Linear):
    def forward(self, x):
        for kind, send in KINDS.items():
            known = torch.arange(3, device="cuda")
            assert send(known, torch.zeros_like(known)).tolist() == [0, 1, 2], kind
        unknown = (x[0, :3] * 10).long()
        zeros = torch.zeros_like(unknown)
        dist.all_to_all_single(zeros, unknown)
        assert zeros.tolist() != [0, 0, 0]
        return super().forward(x)
model = Model(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_numbers_come_through_every_collective_of_one_process(tmp_path: Path) -> None:
    """Of a script, and of its model in a batch; zeros go where numbers come that nobody knows."""
    model, _ = found(tmp_path, GROUP_OF_ONE)
    assert not {c.op for c in captured(model).calls if not c.op.startswith("aten.")}
