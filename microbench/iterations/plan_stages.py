"""Models cut into stages: pipelines (torch.distributed.pipelining) and cyclic data parallelism.

Each stage has as many blocks, one more in the first where they do not divide; the first also
enters, the last leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from microbench.iterations.measured_plan import MeasuredPlan, OnPhase
from microbench.step import StepSettings, make_optimizer


class Stage(nn.Module):
    """A run of a case's blocks, with what is before the first and behind the last."""

    def __init__(self, model: Any, first: int, stop: int) -> None:
        super().__init__()
        self.enters, self.leaves = first == 0, stop == len(model.blocks)
        self.own = model
        self.first, self.stop = first, stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The case's input or the stage before's output, to the next stage's input or logits."""
        if self.enters:
            x = self.own.enter(x)
        x = self.own.through(x, self.own.blocks[self.first : self.stop])
        if self.leaves:
            x = self.own.leave(x)
        return x


def edges(blocks: int, stages: int) -> list[int]:
    """First block of each stage, and the number of blocks; ValueError for too few blocks."""
    if blocks < stages:
        raise ValueError(f"{stages} stages, the model has {blocks} blocks")
    found = [0]
    for i in range(stages):
        found.append(found[-1] + blocks // stages + (i < blocks % stages))
    return found


def own_parameters(model: Any, first: int, stop: int) -> list[nn.Parameter]:
    """Parameters of a stage; a tied table belongs to both ends."""
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


def _first_input(given: dict[str, Any]) -> torch.Tensor:
    """What the model computes with; labels come after it."""
    found: torch.Tensor = next(iter(given.values()))
    return found


def make_pipeline_step(
    model: Any,
    given: dict[str, Any],
    loss_of: Callable[[Any, dict[str, Any]], Any],
    plan: MeasuredPlan,
    settings: StepSettings,
    on_phase: OnPhase,
) -> Callable[[], None]:
    """This rank's stage: a schedule of micro-batches, the tied table's gradients, the optimizer."""
    rank, micro = dist.get_rank(), plan.microbatches
    spans = list(pairwise(edges(len(model.blocks), plan.pp)))
    parameters = own_parameters(model, *spans[rank])
    name, labels = list(given.items())[-1]
    inputs = _first_input(given)

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


def make_cyclic_step(
    model: Any,
    given: dict[str, Any],
    loss_of: Callable[[Any, dict[str, Any]], Any],
    settings: StepSettings,
    on_phase: OnPhase,
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Cyclic data parallelism, version 1 (arXiv:2403.08837): this replica's step, and its end.

    Replica r adds a stage's gradients to the sum it got from r - 1 and sends it on as soon as it
    has them; the last one updates the stage and its weights go round to the others, who take them
    one step later. Nobody waits for all: the chain of sums keeps replicas two stages apart.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    spans = list(pairwise(edges(len(model.blocks), n)))
    stages = [Stage(model, *span) for span in spans]
    seen: set[int] = set()
    owned = []
    for span in spans:
        mine = [p for p in own_parameters(model, *span) if id(p) not in seen]
        seen |= {id(p) for p in mine}
        owned.append(mine)
    links = _Links(owned, rank, n)
    last = rank == n - 1
    optimizers = [make_optimizer(ps, settings.optimizer) for ps in owned] if last else []

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        on_phase("forward")
        x, cuts = _first_input(given), list[tuple[torch.Tensor, torch.Tensor]]()
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
                loss_of(after, given).backward()
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
    """Messages of one replica: sums of gradients to the next, new weights round the ring."""

    def __init__(self, owned: list[list[nn.Parameter]], rank: int, n: int) -> None:
        self.owned, self.rank, self.n = owned, rank, n
        sizes = [sum(p.numel() for p in ps) for ps in owned]
        self.sums = [torch.zeros(size, device=owned[0][0].device) for size in sizes]
        self.weights = [torch.zeros(size, device=owned[0][0].device) for size in sizes]
        self.arriving: dict[int, Any] = {}  # by stage: weights of the step before
        self.sent: dict[tuple[str, int], list[tuple[Any, torch.Tensor]]] = {}

    def _send(self, kind: str, s: int, flat: torch.Tensor, to: int) -> None:
        """Two messages of a kind may be under way: a replica takes weights two steps late."""
        under_way = self.sent.setdefault((kind, s), [])
        while len(under_way) > 1:
            under_way.pop(0)[0].wait()
        work = dist.isend(flat, to, tag=2 * s + (kind == "weights"))
        under_way.append((work, flat))  # the tensor must live until it is sent

    def pass_gradients(self, s: int) -> None:
        """This stage's gradients, added to what came from the replica before."""
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
        """New weights of a stage, from the last replica on round the ring."""
        flat = torch.cat([p.detach().reshape(-1) for p in self.owned[s]])
        self._send("weights", s, flat, (self.rank + 1) % self.n)

    def drain(self) -> None:
        """Take what is still under way, so that the next measurement does not."""
        for s in self.arriving:
            while self.arriving[s]:
                self.take_weights(s, due=1)
        for under_way in self.sent.values():
            for work, _ in under_way:
                work.wait()

    def take_weights(self, s: int, due: int = 2) -> None:
        """Weights that the last replica made two steps ago; sent on unless it is the next."""
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
