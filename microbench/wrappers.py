"""What torch's parallel wrappers cost the host, measured in a group of one rank.

Each workload is forward and backward of a small model, wrapped, less the same model bare. With one
rank messages are copies; what is left is hooks, dispatch and bookkeeping in Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from microbench.ops.family import Workload

LAYERS = 4
WIDTH = 4


def wrapper_workload(op: str, tensors: int, device: str) -> Workload:
    """One of ``WRAPPERS``; ``tensors``: parameters of each sharded layer."""
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # views, as a transformer has them
    make, calls = WRAPPERS[op]
    run, baseline = make(tensors, device)
    return Workload(run=run, baseline=baseline, calls=calls, through_aten=False)


def _layers(tensors: int, device: str) -> nn.Sequential:
    """Layers of so many parameters, two in each product."""

    def layer() -> nn.Sequential:
        products = [nn.Linear(WIDTH, WIDTH) for _ in range(tensors // 2)]
        return nn.Sequential(*products, *[nn.Linear(WIDTH, WIDTH, bias=False)] * (tensors % 2))

    return nn.Sequential(*(layer() for _ in range(LAYERS))).to(device)


def _step(model: nn.Module, device: str) -> Callable[[], None]:
    x = torch.randn(2, 2, WIDTH, device=device)  # as in a transformer: products make views of it

    def run() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()

    return run


@lru_cache(maxsize=1)
def _mesh(device: str) -> Any:
    """This rank alone, whether or not others measure beside it."""
    shape = (dist.get_world_size(), 1)
    return init_device_mesh(device, shape, mesh_dim_names=("beside", "alone"))["alone"]


def _sharded(keep: bool) -> Callable[[int, str], tuple[Callable[[], None], Callable[[], None]]]:
    def make(tensors: int, device: str) -> tuple[Callable[[], None], Callable[[], None]]:
        model = _layers(tensors, device)
        for layer in model:
            fully_shard(layer, mesh=_mesh(device), reshard_after_forward=not keep)
        fully_shard(model, mesh=_mesh(device))
        return _step(model, device), _step(_layers(tensors, device), device)

    return make


def _products(tensors: int, device: str) -> tuple[Callable[[], None], Callable[[], None]]:
    model, bare = (nn.Sequential(*_layers(1, device)) for _ in range(2))
    kinds = (ColwiseParallel, RowwiseParallel)
    cuts: dict[str, Any] = {str(i): kinds[i % 2]() for i in range(LAYERS)}
    flat = nn.Sequential(*(layer[0] for layer in model))  # type: ignore[index]
    return _step(parallelize_module(flat, _mesh(device), cuts), device), _step(bare, device)


def _checkpointed(tensors: int, device: str) -> tuple[Callable[[], None], Callable[[], None]]:
    class Again(nn.Module):
        """Forward of nothing, done again in backward."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(LAYERS):
                x = checkpoint(torch.neg, x, use_reentrant=False)
            return x

    class Once(nn.Module):
        """The same without; the second forward is not its cost."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(LAYERS):
                x = torch.neg(x)
            return x

    def step(model: nn.Module) -> Callable[[], None]:
        x = torch.randn(2, WIDTH, device=device, requires_grad=True)
        return lambda: model(x).sum().backward()

    return step(Again()), step(Once())


def _micro_batches(tensors: int, device: str) -> tuple[Callable[[], None], Callable[[], None]]:
    bare = _layers(1, device)
    group = _mesh(device).get_group()
    stage = PipelineStage(_layers(1, device), 0, 1, torch.device(device), group=group)
    schedule = ScheduleGPipe(stage, LAYERS, loss_fn=lambda y, _: y.sum(), scale_grads=False)
    x = torch.randn(2 * LAYERS, WIDTH, device=device)
    one = _step(bare, device)

    def run() -> None:
        schedule.step(x, target=x)

    def baseline() -> None:
        for _ in range(LAYERS):
            one()

    return run, baseline


WRAPPERS: dict[
    str, tuple[Callable[[int, str], tuple[Callable[[], None], Callable[[], None]]], int]
] = {
    "fsdp_layer": (_sharded(keep=False), LAYERS),
    "fsdp_layer_kept": (_sharded(keep=True), LAYERS),
    "tp_product": (_products, LAYERS),
    "checkpoint": (_checkpointed, LAYERS),
    "pipeline_micro": (_micro_batches, LAYERS),
}
