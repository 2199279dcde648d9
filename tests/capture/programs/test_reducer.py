"""What a reducer's buckets and redistributed tensors send, as torch's own do."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reshardings import PAIRS, RANKS, pairs, reshard
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from itercast.capture.opcall import OpCall
from itercast.capture.programs.capture import capture_program
from itercast.capture.programs.program import COLLECTIVE, FIRST_GROUP_STREAM


class Wide(nn.Module):
    """Layers of different sizes, used in another order than they are declared, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(700, 300)
        self.first = nn.Linear(50, 700)
        self.middle = nn.Sequential(nn.Linear(700, 700), nn.BatchNorm1d(700))

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x)))


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


def launched(program: Any, ranks: int = 2) -> list[OpCall]:
    """What a step of rank 0 launches of a program that joins a group first."""

    def joined() -> Any:
        dist.init_process_group("nccl")
        return program()

    return capture_program(joined, ranks).ranks[0].calls


def sent(calls: list[OpCall]) -> list[int]:
    """Bytes of all collectives."""
    return [c.kwargs["bytes"] for c in calls if c.op == COLLECTIVE]


@pytest.mark.parametrize("mebibytes", [None, 1, 0.5])
def test_buckets_are_those_of_torch(tmp_path: Path, mebibytes: float | None) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    expected = real_buckets(mebibytes)
    dist.destroy_process_group()

    def program() -> Any:
        model = DistributedDataParallel(Wide(), bucket_cap_mb=mebibytes)
        x = torch.randn(8, 50)
        return lambda: model(x).sum().backward()

    calls = launched(program, 8)
    assert sent([c for c in calls if c.kwargs.get("kind") == "all_reduce"]) == expected
    broadcast = sent([c for c in calls if c.kwargs.get("kind") == "broadcast"])
    assert sorted(broadcast) == [8, 2 * 700 * 4]  # running mean and variance; their count
    assert [c.op for c in calls].count("aten.mul.Tensor") == 8  # each gradient into its bucket


def test_nothing_is_sent_in_no_sync() -> None:
    def program() -> Any:
        model = DistributedDataParallel(nn.Linear(8, 8))
        x = torch.randn(4, 8)

        def step() -> None:
            with model.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()

        return step

    assert sent(launched(program)) == [4 * (64 + 8)]


def test_join_counts_in_forward_the_ranks_that_still_have_data() -> None:
    """One number for them, and one for those that sum, before gradients of 8 x 8 + 8 numbers."""

    def program() -> Any:
        model = DistributedDataParallel(nn.Linear(8, 8))
        x = torch.randn(4, 8)

        def step() -> None:
            with suppress(StopIteration), Join([model]):
                model(x).sum().backward()
                raise StopIteration  # what ranks send that have no more data is no part of a step

        return step

    assert sent(launched(program)) == [4, 4, 4 * (64 + 8)]


def test_statistics_can_be_asked_for() -> None:
    """As Lightning does when it ends, also after an error."""

    def program() -> Any:
        model = DistributedDataParallel(nn.Linear(8, 8))
        assert "can_set_static_graph" not in model._get_ddp_logging_data()
        return lambda: model(torch.randn(4, 8)).sum().backward()

    assert sent(launched(program)) == [4 * (64 + 8)]


def test_hooks_compress_what_is_sent() -> None:
    """Layers of 64 x 64 + 64 numbers in fp16: 2 B each. A bucket is copied in, cast, cast back."""

    def program() -> Any:
        model = DistributedDataParallel(nn.Linear(64, 64))
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        x = torch.randn(4, 64)
        return lambda: model(x).sum().backward()

    calls = launched(program)
    (summed,) = [c for c in calls if c.op == COLLECTIVE]
    assert summed.kwargs["bytes"] == 2 * (64 * 64 + 64) and summed.args[0].dtype == "fp16"
    after = [c for c in calls[calls.index(summed) + 1 :] if c.op.startswith("aten.")]
    decompressed, *copied_out = [c for c in after if c.op == "aten.copy_.default"]
    assert decompressed.stream >= FIRST_GROUP_STREAM  # beside the rest of backward
    assert [c.stream for c in copied_out] == [0, 0]  # the weight's and the bias's gradient


def test_power_sgd_sends_factors_of_rank_one() -> None:
    """Of a gradient of 64 x 32: 64 and 32 numbers, after the bias, which is not compressed."""

    def program() -> Any:
        model = DistributedDataParallel(nn.Linear(32, 64))
        model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
        x = torch.randn(4, 32)

        def step() -> None:
            for _ in range(2):  # the first sends whole gradients
                model(x).sum().backward()

        return step

    assert sent(launched(program)) == 2 * [4 * 64, 4 * 64, 4 * 32]


class Unused(nn.Module):
    """Three layers, of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return self.layers[2](self.layers[0](x))


@pytest.mark.parametrize("static", [False, True])
def test_parameters_without_gradients(static: bool) -> None:
    """A message of 6 numbers says which they are in graphs that change."""

    def program() -> Any:
        options = {"find_unused_parameters": not static, "static_graph": static}
        model = DistributedDataParallel(Unused(), **options)
        x = torch.randn(4, 8)
        return lambda: model(x).sum().backward()

    assert sum(sent(launched(program))) == 4 * 3 * 72 + (0 if static else 4 * 6)


def test_gradients_that_are_views_are_not_copied_out() -> None:
    """Kept from step to step they are divided in place: nothing is copied in either."""

    def program() -> Any:
        model = DistributedDataParallel(nn.Linear(8, 8), gradient_as_bucket_view=True)
        x = torch.randn(4, 8)
        model(x).sum().backward()  # buckets are made anew after it
        return lambda: model(x).sum().backward()

    ops = [c.op for c in launched(program)]
    assert ops.count("aten.div_.Tensor") == 2 and "aten.copy_.default" not in ops


RESHARDINGS = Path(__file__).with_name("reshardings.py")


def captured_sequences() -> list[list[list[Any]]]:
    """Of each rank and pair the captured collectives; a barrier comes after each pair."""

    def program() -> Any:
        dist.init_process_group("nccl")
        meshes = {shape: init_device_mesh("cuda", shape) for shape in ((4,), (2, 2))}

        def step() -> None:
            for shape, before, after in pairs():
                reshard(meshes[shape], before, after)()
                dist.barrier()

        return step

    found: list[list[list[Any]]] = []
    for step in capture_program(program, RANKS, range(RANKS)).ranks.values():
        found.append([[]])
        for facts in (c.kwargs for c in step.calls if c.op == COLLECTIVE):
            if facts["kind"] == "barrier":
                found[-1].append([])
            else:
                found[-1][-1].append([facts["kind"], facts["bytes"], list(facts["ranks"])])
    return [sequences[:-1] for sequences in found]


@pytest.mark.slow
def test_30_random_reshardings_send_what_torch_sends(tmp_path: Path) -> None:
    """On each of four ranks: kind, bytes and group of every collective, in order."""
    path = tmp_path / "sent.json"
    subprocess.run([sys.executable, RESHARDINGS, path], check=True, capture_output=True)
    real, captured = json.loads(path.read_text()), captured_sequences()
    assert len(real) == len(captured) == RANKS
    for mine, theirs in zip(captured, real, strict=True):
        equal = [one == other for one, other in zip(mine, theirs, strict=True)]
        assert equal == [True] * PAIRS, [
            (pair, one, other)
            for pair, one, other in zip(pairs(), mine, theirs, strict=True)
            if one != other
        ]
    kinds = {kind for sequence in real[0] for kind, _, _ in sequence}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
