"""The reducer that captures use fills the buckets that torch's own fills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from itercast.microbench.programs.capture import capture_program
from itercast.microbench.programs.program import COLLECTIVE


class Wide(nn.Module):
    """Layers of different sizes, used in another order than they are declared, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(700, 300)
        self.first = nn.Linear(50, 700)
        self.middle = nn.Sequential(nn.Linear(700, 700), nn.BatchNorm1d(700))

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x)))


@pytest.fixture()
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def real_buckets(mebibytes: float | None) -> list[int]:
    """Bytes of the buckets that torch's reducer sums in the second step, in order."""
    sizes: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        sizes.append(bucket.buffer().numel() * 4)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(Wide(), bucket_cap_mb=mebibytes)
    model.register_comm_hook(None, hook)
    for _ in range(2):
        sizes.clear()
        model(torch.randn(8, 50)).sum().backward()
    return sizes


@pytest.mark.parametrize("mebibytes", [None, 1, 0.5])
def test_buckets_are_those_of_torch(one_process: None, mebibytes: float | None) -> None:
    expected = real_buckets(mebibytes)
    dist.destroy_process_group()

    def program() -> Any:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(Wide(), bucket_cap_mb=mebibytes)
        x = torch.randn(8, 50)
        return lambda: model(x).sum().backward()

    calls = [c for c in capture_program(program, 8).ranks[0].calls if c.op == COLLECTIVE]
    assert [c.kwargs["bytes"] for c in calls if c.kwargs["kind"] == "all_reduce"] == expected
    broadcast = [c.kwargs["bytes"] for c in calls if c.kwargs["kind"] == "broadcast"]
    ops = [c.op for c in capture_program(program, 8).ranks[0].calls]
    assert ops.count("aten.mul.Tensor") == 8  # each gradient into its bucket
    assert sorted(broadcast) == [8, 2 * 700 * 4]  # running mean and variance; their count
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_nothing_is_sent_in_no_sync() -> None:
    def program() -> Any:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(nn.Linear(8, 8))
        x = torch.randn(4, 8)

        def step() -> None:
            with model.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()

        return step

    calls = [c for c in capture_program(program, 2).ranks[0].calls if c.op == COLLECTIVE]
    assert [c.kwargs["bytes"] for c in calls] == [4 * (64 + 8)]
