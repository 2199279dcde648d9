"""Workloads that time the Python of torch's parallel wrappers, on one rank.

Each is forward and backward of a small wrapped model, minus the same model unwrapped, or an
optimizer's step on sharded parameters minus that on plain ones. With one rank messages are copies;
what is left is hooks, dispatch and bookkeeping in Python.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from itercast.microbench.ops.family import Workload
from itercast.microbench.store import Row

TIMEOUT_S = 20.0  # no assumption: of a group of one rank, which waits for nobody
LAYERS = 4
WIDTH = 4
UPDATES = 8  # ops of AdamW on a parameter
Pair = tuple[Callable[[], None], Callable[[], None]]  # a run, and its baseline
Make = Callable[[int, str], Pair]


def wrapper_workload(op: str, tensors: int, device: str) -> Workload:
    """Builds the workload of one of ``WRAPPERS``.

    ``tensors``: parameters of a sharded layer, tensors that a checkpointed layer saves, or
    parameters that an optimizer updates.
    """
    if not dist.is_initialized():
        _join_alone(device)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # views, as a transformer has them
    make, calls = WRAPPERS[op]
    run, baseline = make(tensors, device)
    return Workload(run=run, baseline=baseline, calls=calls, through_aten=False)


def _join_alone(device: str) -> None:
    """Makes a process group of this process alone; NCCL must not look for a network."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    backend = "nccl" if device == "cuda" else "gloo"
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def _layers(tensors: int, device: str) -> nn.Sequential:
    """Layers of ``tensors`` parameters, two in each product."""

    def layer() -> nn.Sequential:
        products = [nn.Linear(WIDTH, WIDTH) for _ in range(tensors // 2)]
        return nn.Sequential(*products, *[nn.Linear(WIDTH, WIDTH, bias=False)] * (tensors % 2))

    return nn.Sequential(*(layer() for _ in range(LAYERS))).to(device)


def _step(model: nn.Module, device: str) -> Callable[[], None]:
    """Forward and backward of a model on random inputs, as a function to time."""
    x = torch.randn(2, 2, WIDTH, device=device)  # as in a transformer: products make views of it

    def run() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()

    return run


@lru_cache(maxsize=1)
def _mesh(device: str) -> DeviceMesh:
    """A mesh of this rank alone, whether or not others measure beside it."""
    shape = (dist.get_world_size(), 1)
    return init_device_mesh(device, shape, mesh_dim_names=("beside", "alone"))["alone"]


def _sharded(keep: bool) -> Make:
    """Layers under FSDP2; ``keep``: gathered parameters are kept until backward."""

    def make(tensors: int, device: str) -> Pair:
        model = _layers(tensors, device)
        for layer in model:
            fully_shard(layer, mesh=_mesh(device), reshard_after_forward=not keep)
        fully_shard(model, mesh=_mesh(device))
        return _step(model, device), _step(_layers(tensors, device), device)

    return make


def _tensor_parallel(parameters: int) -> Make:
    """Layers of one product with ``parameters`` (2: with a bias), as tensor parallelism cuts them.

    By columns and by rows in turns.
    """

    def make(tensors: int, device: str) -> Pair:
        layers, bare = _layers(parameters, device), nn.Sequential(*_layers(parameters, device))
        kinds = (ColwiseParallel, RowwiseParallel)
        cuts: Row = {str(i): kinds[i % 2]() for i in range(LAYERS)}
        flat = nn.Sequential(*(layer[0] for layer in layers))  # type: ignore[index]
        return _step(parallelize_module(flat, _mesh(device), cuts), device), _step(bare, device)

    return make


def _loss(tensors: int, device: str) -> Pair:
    """Cross entropy over logits cut by vocabulary (loss_parallel), and over whole ones."""
    logits, labels = torch.randn(2, 4, 64, device=device), torch.arange(8, device=device)
    whole = logits.clone().requires_grad_()
    parts = distribute_tensor(logits, _mesh(device), [Shard(2)]).requires_grad_()

    def cross_entropy(x: torch.Tensor) -> None:
        nn.functional.cross_entropy(x.reshape(8, -1), labels).backward()

    def run() -> None:
        with loss_parallel():
            cross_entropy(parts)

    return run, lambda: cross_entropy(whole)


def _checkpointed(tensors: int, device: str) -> Pair:
    """Layers of ops that save a tensor each; the second forward is not the checkpoint's cost."""
    x = torch.randn(2, WIDTH, device=device, requires_grad=True)

    def layer(y: torch.Tensor) -> torch.Tensor:
        for _ in range(tensors):
            y = torch.sin(y)
        return y

    def run() -> None:
        y = x
        for _ in range(LAYERS):
            y = checkpoint(layer, y, use_reentrant=False)
        y.sum().backward()

    def baseline() -> None:
        y = x
        for _ in range(LAYERS):
            y = layer(y)
        y.sum().backward()
        for _ in range(LAYERS):
            layer(x)

    return run, baseline


def _updates(kind: type[torch.optim.Optimizer], *, foreach: bool = True) -> Make:
    """Optimizer steps over a number of parameters, at once or in a loop, sharded and plain."""

    def make(tensors: int, device: str) -> Pair:
        def step(sharded: bool) -> Callable[[], None]:
            values = [torch.ones(WIDTH, WIDTH, device=device) for _ in range(tensors)]
            if sharded:
                values = [distribute_tensor(v, _mesh(device), [Shard(0)]) for v in values]
            parameters = [nn.Parameter(v) for v in values]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            return kind(parameters, lr=1e-9, foreach=foreach).step  # type: ignore[call-arg]

        return step(True), step(False)

    return make


def _micro_batches(tensors: int, device: str) -> Pair:
    """A GPipe schedule of one stage over LAYERS micro-batches; the same steps without it."""
    bare = _layers(1, device)
    group = _mesh(device).get_group()
    stage = PipelineStage(_layers(1, device), 0, 1, torch.device(device), group=group)
    schedule = ScheduleGPipe(stage, LAYERS, loss_fn=lambda y, _: y.sum(), scale_grads=False)
    x = torch.randn(2 * LAYERS, WIDTH, device=device)
    micro_step = _step(bare, device)

    def run() -> None:
        schedule.step(x, target=x)

    def baseline() -> None:
        for _ in range(LAYERS):
            micro_step()

    return run, baseline


WRAPPERS: dict[str, tuple[Make, int]] = {
    "fsdp_layer": (_sharded(keep=False), LAYERS),
    "fsdp_layer_kept": (_sharded(keep=True), LAYERS),
    "tp_product": (_tensor_parallel(1), LAYERS),
    "tp_product_bias": (_tensor_parallel(2), LAYERS),
    "tp_loss": (_loss, 1),
    "checkpoint_layer": (_checkpointed, LAYERS),
    "pipeline_micro": (_micro_batches, LAYERS),
    "adamw_dtensor_step": (_updates(torch.optim.AdamW), 1),
    "sgd_dtensor_step": (_updates(torch.optim.SGD), 1),
    "dtensor_update": (_updates(torch.optim.AdamW, foreach=False), UPDATES),
}
