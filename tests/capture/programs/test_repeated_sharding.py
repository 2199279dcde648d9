"""Micro-batches of a model whose wrapper gathers and frees its weights, as DeepSpeed's ZeRO-3."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_repeated_layers import Step, captured, launches
from torch import Tensor, nn

MICRO, UPDATES, RANKS, WIDTH = 5, 2, 8, 16


class Net(nn.Module):
    """Three products."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        Net.runs += 1
        y: Tensor = self.parts(x)
        return y


class Gathering(torch.autograd.Function):
    """What gathers a weight before its part of backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gather: Any) -> Tensor:
        ctx.gather = gather
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.gather()
        return gradient, None


class DeepSpeedEngine(nn.Module):
    """Keeps a shard of each weight, gathers it for forward and backward, and sends two gradients
    in a message: the third when autograd is done. ``calls``: counted in a module, as DeepSpeed's.
    """

    def __init__(self, module: Net) -> None:
        super().__init__()
        self.module, self.bucket = module, list[Tensor]()
        self.weights = [part.weight for part in module.parts]
        self.shards = [nn.Parameter(torch.zeros(WIDTH * WIDTH // RANKS)) for _ in self.weights]
        self.sums = torch.zeros(3, WIDTH * WIDTH // RANKS)
        for part in module.parts:
            part.register_forward_pre_hook(self.before)
            part.register_forward_hook(self.after)
            part.weight.register_post_accumulate_grad_hook(self.ready)
            self.free(part.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.send()

    def gather(self, weight: Any) -> None:
        weight.data = torch.empty(WIDTH, WIDTH)
        shard = next(s for w, s in zip(self.weights, self.shards, strict=True) if w is weight)
        dist.all_gather_into_tensor(weight.data.view(-1), shard.data)

    def free(self, weight: Any) -> None:
        weight.data = torch.empty(0)

    def before(self, part: Any, args: Any) -> None:
        part.calls = getattr(part, "calls", 0) + 1
        self.gather(part.weight)

    def after(self, part: Any, args: Any, output: Tensor) -> Any:
        self.free(part.weight)
        return Gathering.apply(output, partial(self.gather, part.weight))

    def ready(self, weight: Any) -> None:
        self.bucket.append(weight.grad.flatten())
        weight.grad = None
        self.free(weight)
        if len(self.bucket) == 2:
            self.send()

    def send(self) -> None:
        if self.bucket:
            full, size = torch.cat(self.bucket), WIDTH * WIDTH // RANKS
            own = torch.empty(len(self.bucket) * size)
            dist.reduce_scatter_tensor(own, full)
            self.sums[: len(self.bucket)] += own.view(-1, size)
            self.bucket.clear()


def training(others: bool) -> Step:
    """Two updates of five micro-batches; ``others``: a hook not of the engine is there, too."""
    dist.init_process_group()
    engine = DeepSpeedEngine(Net())
    if others:
        seen = list[int]()
        hook: Any = lambda *args: seen.append(len(seen))  # noqa: E731
        hook.__module__ = "others"
        engine.module.parts[0].register_forward_hook(hook)
    optimizer = torch.optim.AdamW(engine.shards)

    def update() -> None:
        for _ in range(MICRO):
            engine.backward(engine(torch.randn(4, WIDTH)).pow(2).mean())
        for shard, total in zip(engine.shards, engine.sums, strict=True):
            shard.grad = total
        optimizer.step()

    def updates() -> None:
        for _ in range(UPDATES):
            update()

    return updates


@pytest.mark.parametrize(("others", "runs"), [(False, 3 + 2), (True, 2 * UPDATES * MICRO)])
def test_micro_batches_are_as_if_all_ran(others: bool, runs: int) -> None:
    """Each gathers three weights twice, and sends two messages of gradients.

    The first is one before the wrapper is known, two show what others do; two that follow updates
    show what such do, as it may be other things. With somebody else's hook all run.
    """
    Net.runs = 0
    found = captured(partial(training, others), repeats=True)
    assert Net.runs == runs
    whole = captured(partial(training, others), repeats=False)
    assert launches(found) == launches(whole)
    assert found.ranks[0].host == whole.ranks[0].host
    assert (found.peak_bytes, found.held_bytes) == (whole.peak_bytes, whole.held_bytes)
    kinds = Counter(call.kwargs["kind"] for call in whole.ranks[0].calls if "kind" in call.kwargs)
    passes = UPDATES * MICRO
    assert kinds == {"all_gather": 6 * passes, "reduce_scatter": 2 * passes}
