"""Steps under parallel plans, run by torch with one process per rank.

- dp: DDP; with zero, FSDP2 over the numbered layers and the root. zero=3: parameters are resharded
  after forward; zero=2: after backward; zero=1: kept, gradients are reduced after the last
  micro-batch.
- tp: DTensor; products split by columns, then rows; vocabulary-parallel embedding, head and loss;
  inside FSDP2 where there are replicas.
- pp and cdp: see ``itercast.extras.measured_plans.stages``.
- local=K: torch's ``PeriodicModelAverager``, with outer SGD by averaged changes; K steps are timed
  as one.
- recompute=full: a checkpoint per numbered layer. compress=0.5: gradients are sent in fp16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from itercast.capture.base.slow_imports import torch
from itercast.capture.cases.registry import EvalCase
from itercast.capture.plan import ParallelPlan
from itercast.capture.step import StepSettings, make_optimizer
from itercast.extras.checkpoints.layers import checkpoint_layers, numbered_layers
from itercast.microbench.iterations.engines import on_device
from itercast.microbench.iterations.measured_plan import OnPhase, PlanStep, measurable_plan
from itercast.microbench.store import Row

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Micro = Callable[[bool], AbstractContextManager[object]]  # of whether a micro-batch is the last


def make_plan_step(
    chosen: EvalCase,
    text: str,
    batch: int,
    seq: int,
    settings: StepSettings,
    device: str,
    on_phase: OnPhase,
) -> PlanStep:
    """Makes the step of this rank; ``batch`` is that of a replica, over all its micro-batches."""
    plan = measurable_plan(text)
    if batch % plan.microbatches:
        raise ValueError(f"plan {text!r}: {batch} samples do not divide by {plan.microbatches}")
    with on_device(device, settings.dtype):
        model = chosen.build()
        count = 1 if plan.pp > 1 else plan.microbatches  # a schedule cuts the batch itself
        batches = [chosen.inputs(batch // count, seq) for _ in range(count)]
    model.train()
    if plan.recompute:
        checkpoint_layers(model)
    if plan.pp > 1 or plan.cdp:
        return _staged(chosen, model, batches[0], plan, settings, device, on_phase)
    model, micro = parallel(model, plan, device)
    run = _accumulated(chosen, model, batches, settings, micro, on_phase)
    if plan.local:
        return PlanStep(run=_averaged(run, model, plan), steps=plan.local)
    return PlanStep(run=run)


def _averaged(step: Callable[[], None], model: Any, plan: ParallelPlan) -> Callable[[], None]:
    """A step of local SGD: every ``plan.local``-th one averages the parameters over all ranks."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    if plan.outer:
        return _diloco_step(step, list(model.parameters()), plan.local)
    averager = PeriodicModelAverager(plan.local)

    def run() -> None:
        step()
        averager.average_parameters(model.parameters())

    return run


def _diloco_step(
    step: Callable[[], None], parameters: list[torch.Tensor], every: int
) -> Callable[[], None]:
    """A step of DiLoCo (arXiv:2311.08105), which averages over ranks after ``every`` calls.

    At an average SGD with Nesterov's momentum moves the parameters of the last average by the mean
    change since, and all ranks continue from there.
    """
    from torch.distributed.algorithms.model_averaging.utils import average_parameters

    averaged = [p.detach().clone().requires_grad_() for p in parameters]
    outer = torch.optim.SGD(averaged, lr=0.7, momentum=0.9, nesterov=True, foreach=True)
    steps, world = itertools.count(1), cast(Any, torch.distributed.group.WORLD)

    @torch.no_grad()
    def average() -> None:
        changes: list[Any] = list(torch._foreach_sub(averaged, parameters))
        average_parameters(iter(changes), world)
        for p, change in zip(averaged, changes, strict=True):
            p.grad = change
        outer.step()
        torch._foreach_copy_(parameters, averaged)

    def run() -> None:
        step()
        if next(steps) % every == 0:
            average()

    return run


def _staged(
    chosen: EvalCase,
    model: Any,
    batch: Row,
    plan: ParallelPlan,
    settings: StepSettings,
    device: str,
    on_phase: OnPhase,
) -> PlanStep:
    """The step of a model cut into stages."""
    from itercast.extras.measured_plans.stages import CyclicStep, PipelineStep  # needs torch

    if not hasattr(model, "through"):
        raise ValueError(f"plan {str(plan)!r}: {chosen.name} has no stages")
    if plan.pp > 1:
        mesh = _mesh(plan, device)
        if plan.tp > 1:
            model = _tensor_parallel(model, plan, mesh["tp"])
        make = partial(_optimizer, settings=settings)
        return PlanStep(run=PipelineStep(model, batch, chosen.loss, plan, mesh, make, on_phase))
    run = CyclicStep(model, batch, chosen.loss, settings, on_phase)
    return PlanStep(run=run, barrier=False, finish=run.links.drain)


def parallel(model: Any, plan: ParallelPlan, device: str) -> tuple[Any, Micro]:
    """Wraps the model for the plan's parallelism (DDP, FSDP2, tensor parallelism).

    Also returns a function that gets whether a micro-batch is the last one of the step and returns
    the context to run it in (without gradient synchronisation if it is not).
    """
    if plan.tp > 1:
        from torch.distributed.tensor.parallel import loss_parallel  # lazy, as above

        mesh = _mesh(plan, device)
        model = _tensor_parallel(model, plan, mesh["tp"])
        if plan.zero:
            _sharded(model, plan, mesh["dp"])
        return model, lambda last: loss_parallel()
    if plan.zero:
        return _sharded(model, plan, _mesh(plan, device))
    if plan.dp > 1 and not plan.local:
        return _replicated(model, plan)
    return model, lambda last: nullcontext()


def _replicated(model: Any, plan: ParallelPlan) -> tuple[Any, Micro]:
    """The model inside DDP; only the last micro-batch reduces gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # lazy, as above
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(model)
    if plan.compress:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model, lambda last: nullcontext() if last else model.no_sync()


def _mesh(plan: ParallelPlan, device: str) -> DeviceMesh:
    """The mesh of stages, replicas and tensor-parallel ranks, or of groups of replicas."""
    from torch.distributed.device_mesh import init_device_mesh  # lazy, as above

    if plan.pp > 1:
        sizes = (plan.pp, plan.dp, plan.tp)
        return init_device_mesh(device, sizes, mesh_dim_names=("pp", "dp", "tp"))
    if plan.tp > 1:
        return init_device_mesh(device, (plan.dp, plan.tp), mesh_dim_names=("dp", "tp"))
    if plan.hsdp:
        shape = (plan.dp // plan.hsdp, plan.hsdp)
        return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device, (plan.dp,))


def _sharded(model: Any, plan: ParallelPlan, mesh: DeviceMesh) -> tuple[Any, Micro]:
    """The model under FSDP2, layer by layer; with zero=1 the last micro-batch alone reduces."""
    from torch.distributed.fsdp import fully_shard  # lazy, as above

    for layer in numbered_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=plan.zero == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)

    def micro(last: bool) -> AbstractContextManager[None]:
        if plan.zero == 1:
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
        return nullcontext()

    return model, micro


def _tensor_parallel(model: Any, plan: ParallelPlan, mesh: DeviceMesh) -> Any:
    """Split attention and MLP of each block, embedding and head as Megatron-LM does.

    Each rank has its share of the heads; ValueError where tp does not divide them.
    """
    from torch.distributed.tensor.parallel import parallelize_module  # lazy, as above

    tied = hasattr(model, "tokens") and model.head.weight is model.tokens.weight
    model = parallelize_module(model, mesh, _cuts(model, plan.sp))
    if tied:
        model.head.weight = model.tokens.weight
    for block in getattr(model, "blocks", ()):
        for name in ("heads", "kv_heads"):
            count = getattr(block.attention, name)
            if count % plan.tp:
                raise ValueError(f"tp={plan.tp} does not divide {count} heads")
            setattr(block.attention, name, count // plan.tp)
    return model


def _cuts(model: Any, sp: bool) -> Row:
    """How each module is split, by a pattern of its name; with ``sp`` tokens between layers too."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    tokens = Shard(1) if sp else Replicate()
    head = ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)
    cuts: Row = {"head": head}
    if hasattr(model, "layers"):  # a perceptron
        column = range(0, len(model.layers) - 1, 2)
        cuts = {f"layers.{n}": ColwiseParallel() for n in column}
        cuts |= {f"layers.{n + 1}": RowwiseParallel() for n in column}
    for path in ("attention.q", "attention.kv", "mlp.up", "mlp.gate"):
        cuts[f"blocks.*.{path}"] = ColwiseParallel()
    for path in ("attention.out", "mlp.down"):
        cuts[f"blocks.*.{path}"] = RowwiseParallel(output_layouts=tokens)
    if hasattr(model, "tokens"):
        cuts["tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
    if sp:
        cuts |= {name: SequenceParallel() for name in ("blocks.*.norm1", "blocks.*.norm2", "norm")}
        whole = (tokens, None), (Replicate(), None)
        cuts["blocks.*.attention"] = PrepareModuleInput(
            input_layouts=whole[0], desired_input_layouts=whole[1]
        )
        cuts["blocks.*.mlp"] = PrepareModuleInput(
            input_layouts=tokens, desired_input_layouts=Replicate()
        )
    if sp and getattr(model, "positions", None) is not None:
        cuts["positions"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(0)
        )
    return cuts


def _optimizer(parameters: Sequence[torch.Tensor], settings: StepSettings) -> Any:
    """An optimizer with one group for DTensors and one for plain tensors, as foreach needs."""
    from torch.distributed.tensor import DTensor  # lazy, as above

    kinds = [[p for p in parameters if isinstance(p, DTensor) == k] for k in (True, False)]
    return make_optimizer([{"params": ps} for ps in kinds if ps], settings.optimizer)


def _accumulated(
    chosen: EvalCase,
    model: Any,
    batches: list[Row],
    settings: StepSettings,
    micro: Micro,
    on_phase: OnPhase,
) -> Callable[[], None]:
    """A step that sums the gradients of ``batches``, each in the context ``micro(is the last)``."""
    optimizer = _optimizer(list(model.parameters()), settings)

    def step() -> None:
        on_phase("zero_grad")
        for parameter in model.parameters():
            parameter.grad = None
        for i, inputs in enumerate(batches):
            with micro(i + 1 == len(batches)):
                on_phase("forward")
                output = model(**inputs)
                on_phase("loss")
                loss = chosen.loss(output, inputs)
                on_phase("backward")
                loss.backward()
        on_phase("optimizer")
        if optimizer is not None:
            optimizer.step()

    return step
