"""Of a model's equal layers some run, and the step is as if all ran."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from itercast.capture.programs.capture import capture_ranks, runs_of_steps
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.program import HOST_WAIT, RECORD, WAIT, ProgramCapture, launch_order

LAYERS, WIDTH = 9, 16
Step = Callable[[], None]


class Layer(nn.Module):
    """A norm, a wide product and one back; its number is an attribute, as in many models."""

    runs, seen = 0, 0

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.norm = number, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Layer.runs += 1
        wide: Tensor = self.up(self.norm(x)).relu()
        return x + self.down(wide)  # type: ignore[no-any-return]


class Counts(Layer):
    """A layer that does more each time."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x) * (1 + self.seen)


class Unlike(Layer):
    """A layer that looks at its number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp() if self.number % 2 else super().forward(x)


class FifthUnlike(Layer):
    """A layer that does more at every fifth place, the last one too; others are alike."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp() if self.number % 5 == 3 else super().forward(x)


class Narrowing(Layer):
    """A layer that reads a part of its input, the fourth less than its neighbours."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.read = ((16, 8, 8, 4, 8, 8, 8, 8, 8)[number],)  # a tuple, as strides are

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[..., : self.read[0]].sum()


class Balanced(Layer):
    """A layer that keeps a loss of its own, which the model adds up."""

    def forward(self, x: Tensor) -> Tensor:
        Layer.runs += 1
        wide = self.up(self.norm(x)).relu()
        self.loss = wide.pow(2).mean()
        return x + self.down(wide)  # type: ignore[no-any-return]


class Hiding(Balanced):
    """A layer that keeps its loss where nobody looks for it, so that the program fails."""

    loss = property(
        lambda self: self.hidden["loss"],
        lambda self, value: setattr(self, "hidden", {"loss": value}),
    )


class Masked(Layer):
    """A layer that is given a mask, which it reads."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        return x if mask.all() else x * mask


def masks(fifth: bool = True) -> list[Tensor]:
    """A mask for each layer, with data, as a DataLoader makes it; the others' are all true."""
    with _disable_current_modes():
        return [torch.full((8, 1), fifth or number != 4) for number in range(LAYERS)]


class Model(nn.Module):
    """Nine layers, given ``masks``; ``skips``: what the fifth is given is added to the output."""

    def __init__(
        self,
        kind: type[Layer] = Layer,
        recompute: bool = False,
        skips: bool = False,
        masks: Sequence[Tensor] = (),
    ):
        super().__init__()
        self.masks = masks
        self.layers = nn.ModuleList(kind(number) for number in range(LAYERS))
        self.first, self.recompute, self.skips = nn.Linear(WIDTH, WIDTH), recompute, skips

    def forward(self, x: Tensor) -> Tensor:
        x = kept = self.first(x)
        for number, layer in enumerate(self.layers):
            kept = x if number == 4 else kept
            given = (x, *self.masks[number : number + 1])
            x = checkpoint(layer, *given, use_reentrant=False) if self.recompute else layer(*given)
        own = [layer.loss for layer in self.layers if isinstance(layer, Balanced)]
        return x + sum(own) + kept if self.skips else x + sum(own)  # type: ignore[no-any-return]


def training(model: Any, micro: int = 1) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(micro):
            model(torch.randn(4, 8, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def replicated(micro: int) -> Step:
    dist.init_process_group()
    return training(DistributedDataParallel(Model(), bucket_cap_mb=0.02), micro)


def sharded(recompute: bool) -> Step:
    """FSDP2 of layers under tensor and sequence parallelism."""
    dist.init_process_group()
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    model, policy = Model(recompute=recompute), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    up, down = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    for layer in model.layers:
        plan = {"norm": SequenceParallel(), "up": up, "down": down}
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    return training(model)


def captured(program: Callable[[], Step], repeats: bool) -> ProgramCapture:
    """The second of two steps; ``Layer.runs`` counts layers of both."""

    def run(rank: int, log: ProgramLog) -> None:
        log.repeats, Layer.runs, step = log.repeats and repeats, 0, program()
        with runs_of_steps(log):
            step()
            log.reset()
            step()

    return capture_ranks(run, 8, [0])


def launches(program: ProgramCapture) -> list[Any]:
    """What is launched on which memory and streams, numbered in the order in which it is used."""
    calls, memory, points = program.ranks[0].calls, dict[int, int](), dict[int, int]()

    def told(value: Any) -> Any:
        if hasattr(value, "storage"):
            number = memory.setdefault(value.storage, len(memory))
            return value.shape, value.stride, value.dtype, number
        return tuple(map(told, value)) if isinstance(value, tuple) else value

    def facts(i: int) -> Any:
        call = calls[i]
        place = call.op, call.phase, call.module, call.stream, call.recomputed
        if call.op in (RECORD, WAIT, HOST_WAIT):
            return *place, points.setdefault(call.args[0], len(points))
        return *place, told(call.args), told(call.outputs), str(sorted(call.kwargs))

    return [facts(i) for i in launch_order(calls)]


@pytest.mark.parametrize(
    ("program", "runs"),
    [
        (lambda: training(Model()), 6),
        (lambda: training(Model(recompute=True)), 6 + 6),
        (lambda: training(Model(), micro=2), 6 + 6),
        (lambda: training(Model(Masked, masks=masks())), 6),
        (partial(replicated, 1), 6),
        (partial(replicated, 2), 6 + 6),
        (partial(sharded, False), 6),
        (partial(sharded, True), 6 + 6),
    ],
)
def test_equal_layers_are_as_if_all_ran(program: Callable[[], Step], runs: int) -> None:
    """Of nine, numbered from 0: the first, which has no number to compare; two that show the rest.

    And the last three, to which backward comes first: two of them alike, one after these. Three are
    left, 6 run; of a second micro-batch the first one. Checkpoints run layers again in backward.
    """
    found = captured(program, repeats=True)
    assert Layer.runs == 2 * runs
    whole = captured(program, repeats=False)
    assert launches(found) == launches(whole)
    assert found.ranks[0].host == whole.ranks[0].host
    assert (found.peak_bytes, found.held_bytes) == (whole.peak_bytes, whole.held_bytes)


@pytest.mark.parametrize(
    "model",
    [partial(Model, kind) for kind in (Counts, Unlike, FifthUnlike, Narrowing, Balanced, Hiding)]
    + [partial(Model, skips=True), lambda: Model(Masked, masks=masks(fifth=False))],
)
def test_layers_that_are_not_alike_all_run(model: Callable[[], Model]) -> None:
    """They change, do other things by their numbers, keep results; or gradients of inputs add.

    Or one is given another mask.
    """
    program = lambda: training(model())  # noqa: E731
    found, whole = (captured(program, repeats) for repeats in (True, False))
    assert launches(found) == launches(whole) and found.peak_bytes == whole.peak_bytes
