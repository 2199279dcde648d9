"""Steps of models cut into stages: pipelines and cyclic data parallelism.

Blocks are divided evenly, the first stages have one more where they do not divide. The first stage
also has the embedding, the last one the final norm and head.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from itercast.microbench.iterations.measured_plan import OnPhase
from itercast.microbench.plan import ParallelPlan
from itercast.microbench.step import StepSettings, make_optimizer


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


def _first_input(batch: dict[str, Any]) -> torch.Tensor:
    """The model's input; labels come after it."""
    first: torch.Tensor = next(iter(batch.values()))
    return first


def make_pipeline_step(
    model: Any,
    batch: dict[str, Any],
    loss_of: Callable[[Any, dict[str, Any]], Any],
    plan: ParallelPlan,
    settings: StepSettings,
    on_phase: OnPhase,
) -> Callable[[], None]:
    """Makes a step of this rank's stage: micro-batches by schedule, tied gradients, optimizer."""
    rank, micro = dist.get_rank(), plan.microbatches
    spans = list(pairwise(edges(len(model.blocks), plan.pp)))
    parameters = own_parameters(model, *spans[rank])
    name, labels = list(batch.items())[-1]
    inputs = _first_input(batch)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = loss_of(output, {name: target})
        return found

    stage = PipelineStage(Stage(model, *spans[rank]), rank, plan.pp, inputs.device)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[plan.schedule]
    schedule = kind(stage, micro, loss, scale_grads=False)
    optimizer = make_optimizer(parameters, settings.optimizer)
    ends = rank in (0, plan.pp - 1) and _tied(model)
    together = dist.new_group([0, plan.pp - 1]) if plan.pp > 1 else None

    def step() -> None:
        on_phase("zero_grad")
        for parameter in parameters:
            parameter.grad = None
        on_phase("forward")
        if rank == 0:
            schedule.step(inputs)
        elif rank == plan.pp - 1:
            schedule.step(target=labels)
        else:
            schedule.step()
        on_phase("optimizer")
        if ends:
            dist.all_reduce(model.head.weight.grad, group=together)
        if optimizer is not None:
            optimizer.step()

    return step


def _parameters_by_stage(model: Any, spans: list[tuple[int, int]]) -> list[list[nn.Parameter]]:
    """Parameters of each stage; a tied embedding belongs to the first stage only."""
    seen: set[int] = set()
    owned = []
    for span in spans:
        mine = [p for p in own_parameters(model, *span) if id(p) not in seen]
        seen |= {id(p) for p in mine}
        owned.append(mine)
    return owned


def make_cyclic_step(
    model: Any,
    batch: dict[str, Any],
    loss_of: Callable[[Any, dict[str, Any]], Any],
    settings: StepSettings,
    on_phase: OnPhase,
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Makes a step of this replica, and a function to call after the last step.

    Cyclic data parallelism, version 1 (arXiv:2403.08837): replica r adds a stage's gradients to the
    sum received from replica r - 1 and sends the sum to the next one. The last replica updates the
    stage and sends its weights round the ring; the others use them one step later. No replica waits
    for all others: the chain of sums keeps neighbours two stages apart.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    spans = list(pairwise(edges(len(model.blocks), n)))
    stages = [Stage(model, *span) for span in spans]
    owned = _parameters_by_stage(model, spans)
    links = _Links(owned, rank, n)
    last = rank == n - 1
    optimizers = [make_optimizer(ps, settings.optimizer) for ps in owned] if last else []

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        on_phase("forward")
        x, cuts = _first_input(batch), list[tuple[torch.Tensor, torch.Tensor]]()
        for s, stage in enumerate(stages):
            links.take_weights(s)
            before = x.detach().requires_grad_(s > 0)
            x = stage(before)
            cuts.append((before, x))
        on_phase("backward")
        gradient = None
        for s in reversed(range(n)):
            before, after = cuts[s]
            if gradient is None:
                loss_of(after, batch).backward()
            else:
                after.backward(gradient)
            gradient = before.grad
            links.pass_gradients(s)
            if last:
                if optimizers[s] is not None:
                    optimizers[s].step()
                links.pass_weights(s)

    return step, links.drain


class _Links:
    """Messages of one replica: gradient sums to the next replica, new weights round the ring."""

    def __init__(self, owned: list[list[nn.Parameter]], rank: int, n: int) -> None:
        self.owned, self.rank, self.n = owned, rank, n
        sizes = [sum(p.numel() for p in ps) for ps in owned]
        self.sums = [torch.zeros(size, device=owned[0][0].device) for size in sizes]
        self.weights = [torch.zeros(size, device=owned[0][0].device) for size in sizes]
        self.arriving: dict[int, Any] = {}  # by stage: weights of the step before
        self.sent: dict[tuple[str, int], list[tuple[Any, torch.Tensor]]] = {}

    def _send(self, kind: str, s: int, flat: torch.Tensor, to: int) -> None:
        """Send without waiting; up to two messages of a kind and stage are in flight."""
        under_way = self.sent.setdefault((kind, s), [])
        while len(under_way) > 1:
            under_way.pop(0)[0].wait()
        work = dist.isend(flat, to, tag=2 * s + (kind == "weights"))
        under_way.append((work, flat))  # the tensor must live until it is sent

    def pass_gradients(self, s: int) -> None:
        """Add the received sum to a stage's gradients; send it on, or average on the last rank."""
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
        """Receive a stage's weights of two steps ago; send them on unless the last rank is next."""
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
