"""Async tensor parallelism in scripts: torch.compile sends parts of messages beside products."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch._inductor.config
from small_scripts import captured, written
from torch.distributed import _symmetric_memory as symmetric_memory

from itercast.capture.programs.program import COLLECTIVE
from itercast.compose.forecast import Forecast
from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.programs.forecast import forecast_program
from itercast.compose.programs.price import products_beside, sent_in_parts
from itercast.compose.target import find_target

SCRIPT = """
import sys, torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module)
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (8,))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(1024)
        self.up, self.down = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)
    def forward(self, x):
        return self.down(F.relu(self.up(self.norm(x))))
block = parallelize_module(Block().cuda(), mesh, {
    "norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1))})
if "parts" in sys.argv:
    torch._inductor.config._micro_pipeline_tp = True
if "memory" in sys.argv:
    enable_symm_mem_for_group(mesh.get_group().group_name)
model = torch.compile(block) if "compiled" in sys.argv else block
optimizer = torch.optim.AdamW(block.parameters(), foreach=False)
for _ in range(4):
    x = torch.randn(2, 1024, 1024, device="cuda", requires_grad=True)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def flags_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(symmetric_memory, "_group_name_to_store", {})
    once = SimpleNamespace(set_group_info=lambda *args: None)  # torch's own forgets no group
    monkeypatch.setattr(symmetric_memory, "_SymmetricMemory", once)
    with torch._inductor.config.patch(_micro_pipeline_tp=False):
        yield


@pytest.mark.parametrize("missing", ["", "parts", "memory", "compiled"])
@pytest.mark.filterwarnings("ignore:.*enable_symm_mem_for_group:FutureWarning")
def test_messages_beside_their_products(tmp_path: Path, missing: str) -> None:
    """Forward gathers rows for ``up`` and scatters those of ``down``; so does backward, reversed.

    The gradients of weights need all rows that are gathered, and wait for them.
    """
    words = [word for word in ("parts", "memory", "compiled") if word != missing]
    program = captured(written(tmp_path, SCRIPT), *words, gpus=8)
    calls = program.ranks[0].calls
    found = products_beside(calls)
    sent = [c for c in calls if c.op == COLLECTIVE and c.kwargs.get("in_parts")]
    kinds = [(c.phase, c.kwargs["kind"], len(found[c.outputs[0].storage])) for c in sent]
    expected = [
        (p, k, 1) for p in ("forward", "backward") for k in ("all_gather", "reduce_scatter")
    ]
    assert kinds == ([] if missing else expected)
    told = "messages are sent in parts beside products"
    assert [told in note for note in program.notes] == ([] if missing else [True])


@pytest.mark.filterwarnings("ignore:.*enable_symm_mem_for_group:FutureWarning")
def test_what_is_hidden_is_sent_beside_compute(tmp_path: Path) -> None:
    def forecast(*words: str) -> Forecast:
        program = captured(written(tmp_path, SCRIPT), *words, gpus=8)
        return forecast_program(program, find_target("h100-sxm-80gb", "", None, "", ""))

    plain, less = forecast("memory", "compiled"), forecast("parts", "memory", "compiled")
    assert less.exposed_comm_us < plain.exposed_comm_us
    assert less.comm_us == pytest.approx(plain.comm_us, rel=0.01)


@pytest.mark.filterwarnings("ignore:.*enable_symm_mem_for_group:FutureWarning")
def test_the_first_part_waits(tmp_path: Path) -> None:
    """A product of 80 us in 8 parts leaves 30 us of a message of 100: 100 - 7/8 of 80."""
    program = captured(written(tmp_path, SCRIPT), "parts", "memory", "compiled", gpus=8)
    calls = program.ranks[0].calls
    one = PricedOp(op="", family="gemm", phase="forward", duration_us=80.0, flops=0.0, product=True)
    ops = {
        i: one if c.op != COLLECTIVE else replace(one, duration_us=100.0)
        for i, c in enumerate(calls)
    }
    book: Any = SimpleNamespace(contention_of=lambda message, products_frac: 1.0)
    found = sent_in_parts(calls, ops, products_beside(calls), book)
    assert [op.duration_us for op in found.values()] == pytest.approx([30.0] * 4)
