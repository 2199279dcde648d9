"""FSDP2 in a pipeline: a plan gathers, scatters and holds what torch's own program does."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from law_case import rank_for
from plan_case import GPU
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from itercast.capture.programs.capture import capture_program
from itercast.capture.programs.program import COLLECTIVE, launch_order
from itercast.compose.capture_model import capture
from itercast.compose.simulate.memory.stage_memory import stage_memory
from itercast.compose.simulate.stage_rank import pipeline_of

WIDTH, ROWS = 128, 16
SCHEDULES: dict[str, Any] = {
    "1f1b": schedules.Schedule1F1B,
    "gpipe": schedules.ScheduleGPipe,
    "interleaved:2": schedules.ScheduleInterleaved1F1B,
}


class Block(nn.Module):
    """A wide product and one back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Part(nn.Module):
    """Part ``number`` of ``count`` of a model of four blocks between a first layer and a head."""

    def __init__(self, number: int = 0, count: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if number == 0 else nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(4 // count))
        self.head = nn.Linear(WIDTH, 8) if number == count - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def staged(micro: int, schedule: str, zero: int) -> Callable[[], Callable[[], None]]:
    """Two stages of two ranks, each block and what is left of a stage sharded."""

    def program() -> Callable[[], None]:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
        rank, count = mesh["pp"].get_local_rank(), 4 if ":" in schedule else 2
        stages = list[PipelineStage]()
        for number in range(rank, count, 2):
            part = Part(number, count)
            for block in part.blocks:
                fully_shard(block, mesh=mesh["dp"], reshard_after_forward=zero == 3)
            fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
            place, group = torch.device("cpu"), mesh.get_group("pp")
            stages.append(PipelineStage(part, number, count, place, group=group))
        optimizer = torch.optim.AdamW([p for s in stages for p in s.submod.parameters()])
        x, given = torch.randn(ROWS * micro, WIDTH), stages if count > 2 else stages[0]
        pipeline = SCHEDULES[schedule](given, micro, loss_fn=lambda y, t: y.sum())

        def step() -> None:
            pipeline.step(*([x] if rank == 0 else ()), target=x if rank else None)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return program


@pytest.mark.parametrize(
    ("micro", "schedule", "zero"),
    [(4, "1f1b", 3), (3, "gpipe", 3), (4, "interleaved:2", 3), (2, "1f1b", 3), (4, "1f1b", 2)],
)
def test_a_pipeline_of_shards_does_what_torchs_does(micro: int, schedule: str, zero: int) -> None:
    """ZeRO 3 gathers blocks once more than there are micro-batches, in any order of these.

    They are whole where a backward has just run: m - 1 of 2 m times. The root is gathered once, and
    gradients are scattered once. ZeRO 2 gathers all once, a plan in one message. Memory is within
    8 % of torch's.
    """
    program = capture_program(staged(micro, schedule, zero), 4)
    step = capture(Part(), torch.ones(ROWS, WIDTH), batch=ROWS, loss=Tensor.sum)
    rank = rank_for(step, f"dp=2,pp=2,micro={micro},zero={zero},schedule={schedule}", GPU)
    pipeline = pipeline_of([rank] * 2, "adamw")
    own_bytes = 4 * sum(p.numel() for p in Block().parameters())
    for r, (number, launched) in enumerate(program.ranks.items()):
        calls = [launched.calls[i] for i in launch_order(launched.calls)]
        sent, planned = Counter[str](), Counter[str]()
        gathers = 0
        for c in (c.kwargs for c in calls if c.op == COLLECTIVE and c.kwargs["peer"] < 0):
            sent[c["kind"]] += c["bytes"]
            gathers += (c["kind"], c["bytes"]) == ("all_gather", own_bytes)
        for run, times in pipeline.runs_of(r):
            for op in run.sent:
                planned[op.op] += times * round(1024 * op.duration_us)
        assert gathers == 2 * (micro + 1 if zero == 3 else 1)  # two blocks
        assert sent == planned
        memory = sum(stage_memory(rank, "adamw")[r].values())
        assert memory == pytest.approx(program.peak_bytes[number], rel=0.08)
