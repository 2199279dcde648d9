"""Host events without a kernel: module calls, views, autograd, the optimizer's Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from itercast.capture.base.slow_imports import torch
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Numbers,
    Workload,
    autograd_call,
    log_uniform,
)
from itercast.microbench.ops.step.small_ops import small_ops

CALLS = 6  # even and few, so that they run nearly as cold as in a step
REPEATED = "repeated_op"  # a small op of a loop over embedding tables, on a CPU
LOOPED_TABLES = 16
EVENTS = ("module_call", "view_op", "autograd_node", "accumulate_grad", "zero_grad", "backward")
MAX_TENSORS = 640  # GPT-2 XL has 580 parameters
OPTIMIZERS = ("adamw_step", "sgd_step")
FSDP = ("fsdp_layer", "fsdp_layer_kept")  # one layer of ``tensors`` parameters
SHARDED = (*FSDP, "checkpoint_layer", "adamw_dtensor_step", "sgd_dtensor_step")  # see wrappers
USUAL_FIRST = 3  # rounds of events and optimizers before events of parallel wrappers
WRAPPERS = ("tp_product", "tp_product_bias", "tp_loss", "pipeline_micro", "dtensor_update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One event of a kind, or one optimizer step over ``tensors`` parameters without its kernels.

    ``launch`` is the call of one op that queues a kernel, on average over kinds of ops; on a CPU
    it is part of the op. ``repeated_op`` is such a call, kernel included, among many of its kind.
    Events of parallel wrappers (``wrappers``) are those of a forward and a backward.

    ``trial`` numbers repetitions of the same measurement.
    """

    op: str
    tensors: int = 1
    trial: int = 0
    dtype: str = "fp32"


def sweep() -> Iterator[Host]:
    """Yields each kind of event eight times, as single timings differ by half.

    Events that every model has come first.
    """
    rng = np.random.default_rng(11)
    for trial in range(8):
        for op in EVENTS:
            yield Host(op=op, trial=trial)
        for op in OPTIMIZERS:
            for _ in range(4):
                yield Host(op=op, tensors=log_uniform(rng, 1, 400), trial=trial)
        yield Host(op=REPEATED, trial=trial)
        if trial >= USUAL_FIRST:
            yield from wrapped(trial - USUAL_FIRST)
    for trial in range(8 - USUAL_FIRST, 8):
        yield from wrapped(trial)


def on_one_gpu(rng: np.random.Generator) -> Iterator[Host]:
    """Yields host events to time on one GPU: each eight times, in rounds.

    A round has two launches and each event of a step once. Optimizer steps over random numbers of
    tensors come last.
    """
    for trial in range(8):
        yield Host(op="launch", trial=2 * trial)
        yield Host(op="launch", trial=2 * trial + 1)
        for op in EVENTS:
            yield Host(op=op, trial=trial)
    for trial in range(8):
        for op in OPTIMIZERS:
            for _ in range(4):
                yield Host(op=op, tensors=log_uniform(rng, 1, MAX_TENSORS), trial=trial)


def wrapped(trial: int) -> Iterator[Host]:
    """Yields each event of parallel wrappers (DDP, FSDP, tensor parallelism) once."""
    for op in WRAPPERS:
        yield Host(op=op, trial=trial)
    for op in SHARDED:
        for tensors in (1, 4, 12, 30, 90)[: 4 + (op not in FSDP)]:
            yield Host(op=op, tensors=tensors, trial=trial)


def build(p: Host, device: str) -> Workload:
    """Builds a few events on tensors of one element; the same run without them is the baseline."""
    if p.op in OPTIMIZERS:
        return _optimizer(p, device)
    if p.op == "launch":
        return _launches(device)
    if p.op == REPEATED:
        return _repeated_ops(device)
    if p.op in (*SHARDED, *WRAPPERS):
        from itercast.microbench.ops.step._wrappers import wrapper_workload  # needs torch

        return wrapper_workload(p.op, p.tensors, device)
    if p.op == "backward":
        return Workload(run=_leaf_backward(1, device), through_aten=False)
    runs = {"module_call": _module_calls, "view_op": _views, "zero_grad": _zero_grads}
    pairs = {"autograd_node": _autograd_nodes, "accumulate_grad": _leaves}
    run, baseline = pairs[p.op](device) if p.op in pairs else (runs[p.op](device), None)
    return Workload(run=run, baseline=baseline, calls=CALLS, through_aten=False)


def _launches(device: str) -> Workload:
    """Launches of small ops of all kinds."""
    ops = small_ops(device)

    def run() -> None:
        for op in ops:
            op()

    return Workload(run=run, calls=len(ops), through_aten=False)


def _repeated_ops(device: str) -> Workload:
    """Computes bag lengths and starts of several tables, one table after the other."""
    starts = torch.arange(64, device=device)
    end = torch.tensor([64], device=device)

    def run() -> None:
        for _ in range(LOOPED_TABLES):
            lengths = torch.cat((starts[1:], end)) - starts
            lengths.cumsum(0) - lengths

    return Workload(run=run, calls=4 * LOOPED_TABLES, through_aten=False)


def _module_calls(device: str) -> Callable[[], object]:
    """Calls of a module that does nothing."""
    x, module = torch.ones(1, device=device), torch.nn.Identity()

    def run() -> None:
        for _ in range(CALLS):
            module(x)

    return run


def _views(device: str) -> Callable[[], object]:
    """Views of a tensor, which launch no kernel."""
    x = torch.ones(1, device=device)

    def run() -> None:
        for _ in range(CALLS):
            x.view(1, 1)

    return run


def _autograd_nodes(device: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Builds sums with autograd nodes and their backward; the same sums without nodes as baseline.

    A sum passes its gradient through: no op runs in the backward.
    """
    x, leaf = torch.ones(1, device=device), torch.ones(1, device=device, requires_grad=True)
    empty = autograd_call(1, device)

    def run() -> None:
        y = leaf
        for _ in range(CALLS):
            y = torch.add(y, x)
        torch.autograd.grad(y, leaf, x)

    def baseline() -> None:
        y = x
        for _ in range(CALLS):
            y = torch.add(y, x)
        empty()

    return run, baseline


def _leaf_backward(count: int, device: str) -> Callable[[], object]:
    """A backward pass that stores a gradient in each of ``count`` leaves, and runs no op."""
    leaves = [torch.ones(1, device=device, requires_grad=True) for _ in range(count)]
    gradients = [torch.ones(1, device=device) for _ in range(count)]

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(leaves, gradients)

    return run


def _leaves(device: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Builds a backward that accumulates gradients of several leaves; the baseline has one leaf."""
    return _leaf_backward(CALLS + 1, device), _leaf_backward(1, device)


def _zero_grads(device: str) -> Callable[[], object]:
    """Sets every gradient of a module to None, as ``zero_grad`` does."""
    module = torch.nn.ModuleList(torch.nn.Linear(1, 1, device=device) for _ in range(CALLS // 2))

    def run() -> None:
        for parameter in module.parameters():
            parameter.grad = None

    return run


def _optimizer(p: Host, device: str) -> Workload:
    """Builds a foreach step on tensors of one element; its foreach calls alone as baseline."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "_foreach_" in func.name():
                binding = getattr(torch, func._schema.name.removeprefix("aten::"))
                calls.append((binding, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    calls: list[tuple[Any, Any, Any]] = []
    parameters = [torch.nn.Parameter(torch.ones(1, device=device)) for _ in range(p.tensors)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    kind = {"adamw_step": torch.optim.AdamW, "sgd_step": torch.optim.SGD}[p.op]
    optimizer = kind(parameters, lr=1e-9, foreach=True)
    optimizer.step()
    with Log():
        optimizer.step()

    def kernels() -> None:
        with torch.no_grad():
            for binding, args, kwargs in calls:
                binding(*args, **kwargs)

    return Workload(run=optimizer.step, baseline=kernels, through_aten=False)


def flops(p: Host) -> Numbers:
    """0: no arithmetic."""
    return np.zeros_like(p.trial, dtype=float)


def bytes_moved(p: Host) -> Numbers:
    """0: no bytes worth counting."""
    return np.zeros_like(p.trial, dtype=float)


def features(p: Host, gpu: Gpu) -> dict[str, Numbers | str]:
    """The kind and, for an optimizer step, the number of parameters."""
    return {"op": p.op, "dtype": p.dtype, "log_tensors": np.log2(p.tensors)}


def gpu_points(rng: np.random.Generator) -> Iterator[Host]:
    """Yields the events of ``on_one_gpu``, then those of parallel wrappers, on one rank too."""
    yield from on_one_gpu(rng)
    for trial in range(8):
        yield from wrapped(trial)


FAMILY = Family(
    name="host",
    weight=1.5,
    params=Host,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={},
    gpu_sweep=GpuSweep(
        points=gpu_points,
        dtypes={"fp32": 1.0},
        weight=1.0,
    ),
    on_host=True,
)
