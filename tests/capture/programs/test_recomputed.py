"""Layers that are run again in backward, under each way to share them among ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_repeated_layers import WIDTH, Step, captured, launches
from test_repeated_sharding import DeepSpeedEngine
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LAYERS, MICRO = 7, 4
Wrapped = Callable[[nn.Module], Any]


class Layer(nn.Module):
    """A frozen product, and beside it one of low rank that trains, if it is an adapter."""

    def __init__(self, adapter: bool) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(not adapter)
        self.low = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)) if adapter else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.weight(x)
        return x + (y if self.low is None else y + self.low(x)).relu()


class Net(nn.Module):
    """Layers that run again in backward; inputs of the first have a gradient, as in fine-tuning."""

    def __init__(self, adapter: bool, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(Layer(adapter) for _ in range(LAYERS))
        self.parts = [part for part in self.modules() if isinstance(part, nn.Linear)]

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def alone(net: nn.Module) -> Any:
    return net


def replicated(net: nn.Module) -> Any:
    return DistributedDataParallel(net, static_graph=True)


def sharded(net: nn.Module) -> Any:
    for layer in net.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    return fully_shard(net)


def training(
    wrapped: Wrapped, adapter: bool, reentrant: bool, autocast: torch.dtype | None
) -> Step:
    """A step of four micro-batches."""
    dist.init_process_group()
    model = wrapped(Net(adapter, reentrant))
    shards = [p for p in getattr(model, "shards", model.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(shards)
    backward = getattr(model, "backward", torch.Tensor.backward)  # before the capture wraps it

    def step() -> None:
        for _ in range(MICRO):
            with torch.autocast("cuda", autocast or torch.bfloat16, enabled=bool(autocast)):
                loss = model(torch.randn(4, WIDTH)).float().pow(2).mean()
            backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("wrapped", "adapter"),
    [
        *((wrapped, True) for wrapped in (alone, replicated, sharded)),
        *((wrapped, False) for wrapped in (replicated, sharded, DeepSpeedEngine)),
    ],
)
def test_layers_run_again_as_they_ran(
    wrapped: Any, adapter: bool, reentrant: bool, autocast: torch.dtype | None
) -> None:
    """Each of seven layers has one ReLU in forward, and one where it runs again: torch compares
    what the two keep. With repeats the launches are those of the run without.
    """
    program = partial(training, wrapped, adapter, reentrant, autocast)
    found, whole = (captured(program, repeats) for repeats in (True, False))
    for capture in (found, whole):
        relus = [c.recomputed for c in capture.ranks[0].calls if c.op == "aten.relu.default"]
        assert (relus.count(False), relus.count(True)) == (MICRO * LAYERS, MICRO * LAYERS)
    assert launches(found) == launches(whole)
    assert found.ranks[0].host == whole.ranks[0].host
    assert (found.peak_bytes, found.held_bytes) == (whole.peak_bytes, whole.held_bytes)
