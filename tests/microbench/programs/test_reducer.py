"""The reducer that captures use fills the buckets that torch's own fills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from itercast.microbench.programs.capture import capture_program
from itercast.microbench.programs.program import COLLECTIVE, FIRST_GROUP_STREAM


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


def test_hooks_compress_what_is_sent() -> None:
    """Layers of 64 x 64 + 64 numbers in fp16: 2 B each. A bucket is copied in, cast, cast back."""

    def program() -> Any:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(nn.Linear(64, 64))
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        x = torch.randn(4, 64)
        return lambda: model(x).sum().backward()

    calls = capture_program(program, 2).ranks[0].calls
    (sent,) = [c for c in calls if c.op == COLLECTIVE]
    assert sent.kwargs["bytes"] == 2 * (64 * 64 + 64) and sent.args[0].dtype == "fp16"
    after = [c for c in calls[calls.index(sent) + 1 :] if c.op.startswith("aten.")]
    decompressed, *copied_out = [c for c in after if c.op == "aten.copy_.default"]
    assert decompressed.stream >= FIRST_GROUP_STREAM  # beside the rest of backward
    assert [c.stream for c in copied_out] == [0, 0]  # the weight's and the bias's gradient


def test_power_sgd_sends_factors_of_rank_one() -> None:
    """Of a gradient of 64 x 32: 64 and 32 numbers, after the bias, which is not compressed."""

    def program() -> Any:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(nn.Linear(32, 64))
        state = PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
        x = torch.randn(4, 32)

        def step() -> None:
            for _ in range(2):  # the first sends whole gradients
                model(x).sum().backward()

        return step

    calls = [c for c in capture_program(program, 2).ranks[0].calls if c.op == COLLECTIVE]
    assert [c.kwargs["bytes"] for c in calls] == 2 * [4 * 64, 4 * 64, 4 * 32]


@pytest.mark.parametrize("static", [False, True])
def test_parameters_without_gradients(static: bool) -> None:
    """One of three layers is not used: a message of 6 numbers says so in graphs that change."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Any) -> Any:
            return self.layers[2](self.layers[0](x))

    def program() -> Any:
        dist.init_process_group("nccl")
        options = {"find_unused_parameters": not static, "static_graph": static}
        model = DistributedDataParallel(Unused(), **options)
        x = torch.randn(4, 8)
        return lambda: model(x).sum().backward()

    calls = [c for c in capture_program(program, 2).ranks[0].calls if c.op == COLLECTIVE]
    total = sum(c.kwargs["bytes"] for c in calls)
    assert total == 4 * 3 * 72 + (0 if static else 4 * 6)


def test_gradients_that_are_views_are_not_copied_out() -> None:
    """Kept from step to step they are divided in place: nothing is copied in either."""

    def program() -> Any:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(nn.Linear(8, 8), gradient_as_bucket_view=True)
        x = torch.randn(4, 8)
        model(x).sum().backward()  # buckets are made anew after it
        return lambda: model(x).sum().backward()

    ops = [c.op for c in capture_program(program, 2).ranks[0].calls]
    assert ops.count("aten.div_.Tensor") == 2 and "aten.copy_.default" not in ops
