"""Programs as users write them are captured as one rank of many launches them."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from itercast.capture.opcall import OpCall
from itercast.capture.programs.capture import capture_program
from itercast.capture.programs.gpus.streams import recorded_streams
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.program import (
    COLLECTIVE,
    HOST,
    HOST_WAIT,
    RECORD,
    WAIT,
    ProgramCapture,
)

Step = Callable[[], Any]


def collectives(capture: ProgramCapture, rank: int = 0) -> list[OpCall]:
    return [c for c in capture.ranks[rank].calls if c.op == COLLECTIVE]


def counted(capture: ProgramCapture, rank: int = 0) -> Counter[tuple[str, int, int]]:
    """Collectives by kind, bytes and number of ranks."""
    return Counter(
        (c.kwargs["kind"], c.kwargs["bytes"], len(c.kwargs["ranks"]))
        for c in collectives(capture, rank)
    )


class Block(nn.Module):
    """Two products without bias: 64 to 256 and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


def training(model: Any, x: Any, foreach: bool | None = None) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(mesh_shape: tuple[int, ...]) -> Callable[[], Step]:
    """Blocks under tensor parallelism inside FSDP2, as (dp, tp)."""

    def program() -> Step:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", mesh_shape, mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            model = nn.Sequential(Block(), Block())
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model:
            parallelize_module(block, mesh["tp"], plan)
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(model, mesh=mesh["dp"])
        model.to_empty(device="cpu")
        return training(model, torch.randn(8, 64, requires_grad=True), foreach=True)

    return program


@pytest.mark.parametrize(("dp", "tp"), [(8, 8), (512, 8)])
def test_fsdp_and_tensor_parallelism(dp: int, tp: int) -> None:
    """Per block 2 x 64 x 256 / tp weights, padded to whole rows of every rank.

    A rank has 256 / 8 = 32 rows of ``up`` and 64 rows of ``down``. On 8 ranks they divide evenly;
    on 512 every rank has a row of each, 64 + 32 elements. The copy into the buffer, the gather and
    the scatter each have a stream, and wait for points that were recorded. Python that runs:
    FSDP2's hooks of two blocks and of the root, which holds nothing; SGD over DTensors.
    """
    capture = capture_program(sharded((dp, tp)), dp * tp)
    gathered = 2 * 64 * 32 if dp == 8 else 512 * (64 + 32)
    assert counted(capture) == {
        ("all_gather", 2 * gathered, dp): 4,  # bf16, of both blocks, forward and backward
        ("reduce_scatter", 4 * gathered, dp): 2,  # fp32
        ("all_reduce", 8 * 64 * 2, tp): 4,  # outputs in forward, inputs' gradients in backward
    }
    streams = {(c.kwargs["kind"], c.stream) for c in collectives(capture)}
    assert streams >= {("all_gather", 2), ("reduce_scatter", 3)} and len(streams) == 3
    calls, recorded = capture.ranks[0].calls, set[int]()
    for call in calls:
        recorded |= {call.args[0]} if call.op == RECORD else set()
        assert call.op != WAIT or call.args[0] in recorded
    python = [c for c in calls if c.op == HOST]
    layers = [(c.args, c.phase) for c in python if c.args[0] == "fsdp_layer"]
    assert layers == [(("fsdp_layer", 2), p) for p in ("forward",) * 2 + ("backward",) * 2]
    steps = [c.args for c in python if c.phase == "optimizer"]
    assert steps == [("sgd_step", 4), ("sgd_dtensor_step", 4)]


def test_an_optimizer_that_updates_one_dtensor_after_another_pays_for_each_op() -> None:
    """SGD adds to each of two weights; over lists it takes one event for both."""

    def program(foreach: bool) -> Step:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (2,))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(Block(), mesh, plan)
        return training(model, torch.randn(8, 64, requires_grad=True), foreach=foreach)

    def events(foreach: bool) -> list[tuple[str, int]]:
        calls = capture_program(partial(program, foreach), 2).ranks[0].calls
        return [c.args for c in calls if c.op == HOST and c.phase == "optimizer"]

    assert events(True) == [("sgd_step", 2), ("sgd_dtensor_step", 2)]
    assert events(False) == [("sgd_step", 2), ("dtensor_update", 1), ("dtensor_update", 1)]


def test_ranks_outside_the_world_or_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ValueError, match=r"ranks \[8\]: allowed are 0 to 7"):
        capture_program(sharded((8, 1)), 8, ranks=[8])

    def program() -> Step:
        dist.init_process_group("nccl")
        objects: list[Any] = [None]
        dist.recv_object_list(objects, src=1 - dist.get_rank())
        return lambda: None

    with pytest.raises(ValueError, match=r"ranks \[0, 1\] wait for each other's objects"):
        capture_program(program, 2)


def test_a_rank_runs_again_once_another_has_sent_what_it_waits_for() -> None:
    """Shapes go down a chain of four ranks and back: three are given up once, at what comes back.

    Each rank is begun where the one before it waits: 0, 1, 2, 3, then 2, 1, 0.
    """
    begun = list[int]()

    def program() -> Step:
        dist.init_process_group("nccl")
        rank, objects = dist.get_rank(), ["shape"]
        begun.append(rank)
        for step in (1, -1):
            if 0 <= rank - step < 4:
                dist.recv_object_list(objects, src=rank - step)
            if 0 <= rank + step < 4:
                dist.send_object_list(objects, dst=rank + step)
        return lambda: None

    assert sorted(capture_program(program, 4).ranks) == [0, 1, 2, 3]
    assert begun == [0, 1, 2, 3, 2, 1, 0]


def test_a_reduction_in_the_background_is_awaited_where_the_program_waits() -> None:
    def program() -> Step:
        dist.init_process_group("nccl")
        pair = dist.new_group([0, 1])
        x = torch.randn(256, 256)

        def step() -> None:
            work = dist.all_reduce(x, async_op=True)
            x @ x
            work.wait()
            dist.all_reduce(x, group=pair)

        return step

    calls = capture_program(program, 8).ranks[0].calls
    assert [(c.op.removeprefix("itercast."), c.stream) for c in calls] == [
        ("record", 0),
        ("wait", 1000),
        ("collective", 1000),
        ("record", 1000),
        ("aten.mm.default", 0),
        ("wait", 0),
        ("collective", 0),
    ]
    assert calls[2].kwargs["ranks"] == tuple(range(8)) and calls[6].kwargs["ranks"] == (0, 1)
    assert calls[2].kwargs["bytes"] == 4 * 256 * 256


def of_many(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Each collective of torch.distributed that returns a handle, on 8 ranks."""
    parts = [torch.empty(32, 256) for _ in range(8)]
    own: dict[str, Any] = {"async_op": True}
    return {
        "all_reduce": lambda: dist.all_reduce(x, **own),
        "broadcast": lambda: dist.broadcast(x, 0, **own),
        "reduce": lambda: dist.reduce(x, 0, **own),
        "all_gather": lambda: dist.all_gather(parts, parts[0], **own),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(x, parts[0], **own),
        "reduce_scatter": lambda: dist.reduce_scatter(parts[0], parts, **own),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(parts[0], x, **own),
        "all_to_all": lambda: dist.all_to_all(parts, [torch.clone(p) for p in parts], **own),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(x), x, **own),
        "isend": lambda: dist.isend(x, 1),
        "irecv": lambda: dist.irecv(x, 1),
    }


@pytest.mark.parametrize("name", of_many(torch.empty(0)))
@pytest.mark.parametrize("future", [False, True])
def test_the_handle_of_each_collective_tells_of_waiting(name: str, future: bool) -> None:
    """Whatever method of a group torch calls for it: their names change from version to version."""

    def program() -> Step:
        dist.init_process_group("nccl")
        x = torch.randn(256, 256)

        def step() -> None:
            work = of_many(x)[name]()
            (work.get_future() if future else work).wait()

        return step

    ends = capture_program(program, 8).ranks[0].calls[-2:]
    assert [c.op for c in ends] == ["itercast.record", "itercast.wait"] and ends[1].stream == 0
    assert ends[0].args == ends[1].args


@pytest.mark.parametrize("future", [False, True])
def test_a_message_takes_no_memory_after_it_nor_a_model_on_the_meta_device(future: bool) -> None:
    """Three messages one after another: 256 KiB of one, and of what was there before."""

    def program() -> Step:
        dist.init_process_group("nccl")
        x, ghost = torch.randn(256, 256), torch.zeros(512, 512, device="meta")

        def sent() -> Any:
            return dist.all_reduce(x + 1, async_op=True)

        def step() -> None:
            for _ in range(3):
                (sent().get_future() if future else sent()).wait()
            ghost.add_(1)

        return step

    assert capture_program(program, 8).peak_bytes == {0: 2 * 4 * 256 * 256}


@pytest.mark.parametrize(
    ("device", "source", "target", "expected"),
    [
        ("cuda", [Shard(0)], [Shard(1)], [("all_to_all", 4 * 8 * 16)]),
        ("cpu", [Shard(0)], [Shard(1)], [("all_gather", 4 * 64 * 16)]),
        ("cuda", [Shard(0)], [Replicate()], [("all_gather", 4 * 64 * 16)]),
        ("cuda", [Partial()], [Shard(0)], [("reduce_scatter", 4 * 8 * 16)]),
        ("cuda", [Partial()], [Replicate()], [("all_reduce", 4 * 8 * 16)]),
        ("cuda", [Replicate()], [Shard(0)], []),
    ],
)
def test_resharding(device: str, source: Any, target: Any, expected: list[tuple[str, int]]) -> None:
    """A local part of 8 x 16 numbers on each of 8 ranks; a mesh of CPUs gathers to move shards."""

    def program() -> Step:
        dist.init_process_group("nccl")
        mesh = init_device_mesh(device, (8,))
        x = DTensor.from_local(torch.randn(8, 16), mesh, source)
        return lambda: x.redistribute(placements=target).to_local().sum()

    sent = collectives(capture_program(program, 8))
    assert [(c.kwargs["kind"], c.kwargs["bytes"]) for c in sent] == expected


@pytest.mark.parametrize(("reshards", "gathers"), [(False, 1), (True, 5)])
def test_fsdp_in_a_pipeline_scatters_gradients_once(reshards: bool, gathers: int) -> None:
    """Four micro-batches through two stages of two ranks, gradients whole up to the last one.

    So are parameters (ZeRO 2), unless forward gives them up (ZeRO 3). Then a forward gathers that
    does not follow a backward, two of the first stage and one of the last, and each backward but
    one that follows another: F F B F B F B B and F B F B F B F B.
    """

    def program() -> Step:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
        rank, model = mesh["pp"].get_local_rank(), nn.Linear(64, 64)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=reshards)
        stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, t: ((y - t) ** 2).mean())
        x = torch.randn(16, 64)
        return lambda: schedule.step(x) if rank == 0 else schedule.step(target=x)

    capture = capture_program(program, 4)
    for rank in capture.ranks:
        kinds = Counter(c.kwargs["kind"] for c in collectives(capture, rank))
        assert kinds == {"send": 4, "recv": 4, "reduce_scatter": 1, "all_gather": gathers}


def test_a_pipeline_is_captured_on_every_stage() -> None:
    """1F1B of 4 micro-batches on 3 stages: each boundary carries 4 activations and 4 gradients.

    A message has 4 of 16 samples x 64 numbers in fp32 = 1,024 B.
    """

    def program() -> Step:
        dist.init_process_group("nccl")
        rank, world = dist.get_rank(), dist.get_world_size()
        model = nn.Linear(64, 64)
        stage = PipelineStage(model, rank, world, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, t: ((y - t) ** 2).mean())
        x, target = torch.randn(16, 64), torch.randn(16, 64)

        return lambda: schedule.step(x) if rank == 0 else schedule.step(target=target)

    capture = capture_program(program, 3)
    assert list(capture.ranks) == [0, 1, 2]
    sizes = {c.kwargs["bytes"] for rank in capture.ranks for c in collectives(capture, rank)}
    kinds = [
        Counter((c.kwargs["kind"], c.kwargs["peer"]) for c in collectives(capture, rank))
        for rank in capture.ranks
    ]
    assert sizes == {1024}
    assert kinds[0] == {("send", 1): 4, ("recv", 1): 4}
    assert kinds[1] == {("recv", 0): 4, ("send", 0): 4, ("send", 2): 4, ("recv", 2): 4}
    assert kinds[2] == {("send", 1): 4, ("recv", 1): 4}


def test_memory_is_that_of_tensors_alive() -> None:
    """Two tensors of 1,024 x 4 B before the step; a third lives during it, a fourth after that."""

    def program() -> Step:
        a, b = torch.randn(1024), torch.randn(1024)
        return lambda: [(a + b) is None, (a * b) is None]

    captured = capture_program(program, 1)
    assert captured.peak_bytes == {0: 3 * 4096} and captured.held_bytes == 2 * 4096


def test_what_a_checkpoint_runs_again_is_what_forward_ran() -> None:
    """Attention in a checkpoint: once in forward, once in backward, and its gradient."""

    def program() -> Step:
        x = torch.randn(2, 4, 8, 16, requires_grad=True)

        def block(x: Any) -> Any:
            return nn.functional.scaled_dot_product_attention(x, x, x).sin()

        return lambda: checkpoint(block, x, use_reentrant=False).sum().backward()

    calls = capture_program(program, 1).ranks[0].calls
    ops = [(c.op, c.phase) for c in calls if c.op.startswith("itercast.sdpa")]
    assert ops == [
        ("itercast.sdpa", "forward"),
        ("itercast.sdpa", "backward"),
        ("itercast.sdpa_backward", "backward"),
    ]
    (event,) = [c.args for c in calls if c.op == HOST]
    assert event == ("checkpoint_layer", 4)  # q, k, v and the input of sin


def marks(log: ProgramLog) -> list[tuple[str, int, int]]:
    """Kind, stream and point of each mark."""
    return [(call.op, call.stream, call.args[0]) for call in log.calls]


def test_a_stream_that_waits_for_another_waits_for_the_point_it_has_reached() -> None:
    log = ProgramLog()
    with recorded_streams(log):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert log.stream == side.number == 1
        assert log.stream == 0
    assert marks(log) == [(RECORD, 0, 0), (WAIT, 1, 0)]


def test_an_event_is_a_point_of_the_stream_that_recorded_it() -> None:
    log = ProgramLog()
    with recorded_streams(log):
        event, side = torch.cuda.Event(), torch.cuda.Stream()
        event.wait(side)  # not recorded yet: nothing to wait for
        event.record()
        event.wait(side)
        event.wait()  # its own stream: launches are in order anyway
        event.synchronize()
    assert marks(log) == [(RECORD, 0, 0), (WAIT, 1, 0), (HOST_WAIT, 0, 0)]


def test_cpu_code_gets_the_same_streams() -> None:
    """Code for any device asks torch.cpu, which has streams that do nothing otherwise."""
    log = ProgramLog()
    with recorded_streams(log):
        assert torch.cpu.current_stream() is torch.cuda.current_stream()
        torch.cpu.synchronize()
    assert marks(log) == [(RECORD, 0, 0), (HOST_WAIT, 0, 0)]
