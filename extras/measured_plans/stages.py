"""Steps of models cut into stages: pipelines and cyclic data parallelism.

Blocks are divided evenly, the first stages have one more where they do not divide. The first stage
also has the embedding, the last one the final norm and head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import V_SHAPED
from itercast.capture.step import StepSettings, make_optimizer
from itercast.microbench.iterations.measured_plan import OnPhase

SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
Batch = dict[str, torch.Tensor]
Loss = Callable[[torch.Tensor, Batch], torch.Tensor]


class Stage(nn.Module):
    """Consecutive blocks of a model, with its embedding or its head in the first or last stage."""

    def __init__(self, model: Any, first: int, stop: int) -> None:
        super().__init__()
        self.enters, self.leaves = first == 0, stop == len(model.blocks)
        self.own = model
        self.first, self.stop = first, stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From the model's input, or the output of the stage before, to this stage's output."""
        if self.enters:
            x = self.own.enter(x)
        x = self.own.through(x, self.own.blocks[self.first : self.stop])
        if self.leaves:
            x = self.own.leave(x)
        return x


def edges(blocks: int, stages: int) -> list[int]:
    """First block of each stage, then the number of blocks; ValueError for too few blocks."""
    if blocks < stages:
        raise ValueError(
            f"{stages} stages, the model has {blocks} blocks: allowed are 1 to {blocks}"
        )
    found = [0]
    for i in range(stages):
        found.append(found[-1] + blocks // stages + (i < blocks % stages))
    return found


def spans(model: Any, stages: int) -> list[tuple[int, int]]:
    """First block of each stage, and the first of the next."""
    return list(pairwise(edges(len(model.blocks), stages)))


def own_parameters(model: Any, first: int, stop: int) -> list[nn.Parameter]:
    """Parameters of a stage; a tied embedding belongs to the first stage and to the last."""
    numbered = {id(p) for p in model.blocks.parameters()}
    found = list(model.blocks[first:stop].parameters())
    behind = [*model.norm.parameters(), *model.head.parameters()]
    ends = {id(p) for p in behind}
    if first == 0:
        tables = [model.head.weight] if _tied(model) else []
        rest = (p for p in model.parameters() if id(p) not in numbered | ends)
        found += [*tables, *rest]
    if stop == len(model.blocks):
        found += [p for p in behind if all(p is not q for q in found)]
    return found


def _tied(model: Any) -> bool:
    return hasattr(model, "tokens") and model.head.weight is model.tokens.weight


def _first_input(batch: Batch) -> torch.Tensor:
    """The model's input; labels come after it."""
    return next(iter(batch.values()))


class PipelineStep:
    """Runs a step of this rank's stages: micro-batches by schedule, tied gradients, optimizer.

    ``mesh`` has the axes pp, dp, tp. Replicas of a stage are kept equal by DDP.
    """

    def __init__(
        self,
        model: Any,
        batch: Batch,
        loss_of: Loss,
        plan: ParallelPlan,
        mesh: DeviceMesh,
        optimizer: Callable[[Sequence[nn.Parameter]], Any],
        on_phase: OnPhase,
    ) -> None:
        rank, count = mesh.get_local_rank("pp"), plan.pp * plan.virtual
        folded = plan.schedule in V_SHAPED
        mine = [rank, count - 1 - rank] if folded else range(rank, count, plan.pp)
        self.first, self.last, self.on_phase = rank == 0, count - 1 in mine, on_phase
        self.inputs, (name, self.labels) = _first_input(batch), list(batch.items())[-1]
        parts = spans(model, count)
        owned = [p for i in mine for p in own_parameters(model, *parts[i])]
        self.parameters = list(dict.fromkeys(owned))
        self.optimizer = optimizer(self.parameters)
        group, place = mesh.get_group("pp"), self.inputs.device
        made = ((i, _replicated(model, parts[i], mesh["dp"])) for i in mine)
        stages = [PipelineStage(stage, i, count, place, group=group) for i, stage in made]

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return loss_of(output, {name: target})

        multi = issubclass(SCHEDULES[plan.schedule], schedules.PipelineScheduleMulti)
        given: Any = stages if multi else stages[0]
        make: Any = SCHEDULES[plan.schedule]
        self.schedule = make(given, plan.microbatches, loss, scale_grads=False)
        apart = _tied(model) and self.first != self.last
        self.tied = model.head.weight if apart else None
        _drop_others(model, self.parameters)
        self.cut_loss = loss_parallel if plan.tp > 1 else nullcontext
        width = plan.dp * plan.tp
        ends = [dist.new_group([i, (plan.pp - 1) * width + i]) for i in range(width)]
        self.ends = ends[dist.get_rank() % width]

    def __call__(self) -> None:
        """Run one step."""
        self.on_phase("zero_grad")
        for parameter in self.parameters:
            parameter.grad = None
        self.on_phase("forward")
        given = (self.inputs,) if self.first else ()
        with self.cut_loss():
            target = self.labels if self.last else None
            self.schedule.step(*given, target=target, return_outputs=False)
        self.on_phase("optimizer")
        if self.tied is not None:
            gradient = self.tied.grad
            if isinstance(self.tied, DTensor):  # whole where only the embedding made it
                gradient = gradient.redistribute(placements=self.tied.placements).to_local()
            dist.all_reduce(gradient, group=self.ends)
        if self.optimizer is not None:
            self.optimizer.step()


def _replicated(model: Any, span: tuple[int, int], mesh: DeviceMesh) -> nn.Module:
    """A stage, inside DDP where it has replicas."""
    stage = Stage(model, *span)
    if mesh.size() == 1:
        return stage
    owned = {id(p) for p in own_parameters(model, *span)}
    named = stage.named_parameters(remove_duplicate=False)
    others = [name for name, p in named if id(p) not in owned]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, others)
    return DistributedDataParallel(stage, process_group=mesh.get_group())


def _drop_others(model: nn.Module, kept: Sequence[nn.Parameter]) -> None:
    """Free the parameters of other ranks' stages."""
    own = {id(p) for p in kept}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) not in own:
                module._parameters[name] = None


def _parameters_by_stage(model: Any, parts: Sequence[tuple[int, int]]) -> list[list[nn.Parameter]]:
    """Parameters of each stage; a tied embedding belongs to the first stage only."""
    seen: set[int] = set()
    owned = []
    for span in parts:
        mine = [p for p in own_parameters(model, *span) if id(p) not in seen]
        seen |= {id(p) for p in mine}
        owned.append(mine)
    return owned


class CyclicStep:
    """Runs a step of this replica; ``links.drain`` is to be called after the last one.

    Cyclic data parallelism, version 1 (arXiv:2403.08837): replica r adds a stage's gradients to the
    sum received from replica r - 1 and sends the sum to the next one. The last replica updates the
    stage and sends its weights round the ring; the others use them one step later. No replica waits
    for all others: the chain of sums keeps neighbours two stages apart.
    """

    def __init__(
        self, model: Any, batch: Batch, loss_of: Loss, settings: StepSettings, on_phase: OnPhase
    ) -> None:
        self.model, self.batch, self.loss_of, self.on_phase = model, batch, loss_of, on_phase
        rank, n = dist.get_rank(), dist.get_world_size()
        parts = spans(model, n)
        self.stages = [Stage(model, *span) for span in parts]
        owned = _parameters_by_stage(model, parts)
        self.links = _Links(owned, rank, n)
        self.optimizers: list[Any] = []  # of the last replica, by stage
        if rank == n - 1:
            self.optimizers = [make_optimizer(mine, settings.optimizer) for mine in owned]

    def __call__(self) -> None:
        """Run one step."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self.on_phase("forward")
        x, cuts = _first_input(self.batch), list[tuple[torch.Tensor, torch.Tensor]]()
        for s, stage in enumerate(self.stages):
            self.links.take_weights(s)
            before = x.detach().requires_grad_(s > 0)
            x = stage(before)
            cuts.append((before, x))
        self.on_phase("backward")
        gradient = None
        for s, (before, after) in reversed(list(enumerate(cuts))):
            if gradient is None:
                self.loss_of(after, self.batch).backward()
            else:
                after.backward(gradient)
            gradient = before.grad
            self.links.pass_gradients(s)
            self._update(s)

    def _update(self, s: int) -> None:
        """Update a stage on the last replica, and send its weights."""
        if self.optimizers:
            if self.optimizers[s] is not None:
                self.optimizers[s].step()
            self.links.pass_weights(s)


class _Links:
    """Messages of one replica: gradient sums to the next replica, new weights round the ring."""

    def __init__(self, owned: list[list[nn.Parameter]], rank: int, n: int) -> None:
        self.owned, self.rank, self.n = owned, rank, n
        sizes = [sum(p.numel() for p in ps) for ps in owned]
        self.sums = [torch.zeros(size, device=owned[0][0].device) for size in sizes]
        self.weights = [torch.zeros(size, device=owned[0][0].device) for size in sizes]
        self.arriving: dict[int, int] = {}  # by stage: weights of the step before
        self.sent: dict[tuple[str, int], list[tuple[Any, torch.Tensor]]] = {}

    def _send(self, kind: str, s: int, flat: torch.Tensor, to: int) -> None:
        """Send without waiting; up to two messages of a kind and stage are in flight."""
        under_way = self.sent.setdefault((kind, s), [])
        while len(under_way) > 1:
            under_way.pop(0)[0].wait()
        work = dist.isend(flat, to, tag=2 * s + (kind == "weights"))
        under_way.append((work, flat))  # the tensor must live until it is sent

    def pass_gradients(self, s: int) -> None:
        """Add the received sum to a stage's gradients; send it on; the last rank takes the mean."""
        flat = torch.cat([p.grad.reshape(-1) for p in self.owned[s] if p.grad is not None])
        if self.rank:
            dist.recv(self.sums[s], self.rank - 1, tag=2 * s)
            flat.add_(self.sums[s])
        if self.rank < self.n - 1:
            self._send("sums", s, flat, self.rank + 1)
            self.arriving[s] = self.arriving.get(s, 0) + 1
            return
        flat.div_(self.n)
        at = 0
        for p in self.owned[s]:
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()

    def pass_weights(self, s: int) -> None:
        """Send the updated weights of stage ``s`` to replica 0; the last replica calls this."""
        flat = torch.cat([p.detach().reshape(-1) for p in self.owned[s]])
        self._send("weights", s, flat, (self.rank + 1) % self.n)

    def drain(self) -> None:
        """Receive and send all messages in flight, so that none reaches the next measurement."""
        for s in self.arriving:
            while self.arriving[s]:
                self.take_weights(s, due=1)
        for under_way in self.sent.values():
            for work, _ in under_way:
                work.wait()

    def take_weights(self, s: int, due: int = 2) -> None:
        """Receive a stage's oldest weights, if ``due`` are on their way, and send them on."""
        if self.rank == self.n - 1 or self.arriving.get(s, 0) < due:
            return
        self.arriving[s] -= 1
        dist.recv(self.weights[s], (self.rank - 1) % self.n, tag=2 * s + 1)
        at = 0
        with torch.no_grad():
            for p in self.owned[s]:
                p.copy_(self.weights[s][at : at + p.numel()].view_as(p))
                at += p.numel()
        if self.rank + 1 < self.n - 1:
            self._send("weights", s, self.weights[s].clone(), self.rank + 1)
