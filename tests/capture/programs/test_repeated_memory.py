"""A law: a step with repeated passes takes as much memory as one in which all of them run."""

from functools import partial
from typing import Any

import pytest
import torch
from test_repeated_layers import WIDTH, Step, captured, launches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDE = 64, 256
MICRO = 5  # micro-batches: three run in the first step, and one in the second


class Attending(nn.Module):
    """Returns a loss, and keys and values, which backward reads ("cache"), or logits or a sum that
    it does not read. Keys and values, which may be ``frozen``, can be made again in backward.
    """

    runs = 0

    def __init__(self, returns: str, recompute: bool, frozen: bool) -> None:
        super().__init__()
        self.returns, self.recompute = returns, recompute
        self.keys, self.values = (nn.Linear(WIDTH, WIDE).requires_grad_(not frozen) for _ in "kv")
        self.out = nn.Linear(WIDE, 4 * WIDE)

    def attended(self, x: Tensor) -> tuple[Tensor, ...]:
        keys, values = self.keys(x), self.values(x)
        return keys, values, keys * values

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        Attending.runs += self.training
        run = partial(checkpoint, self.attended, use_reentrant=False)
        keys, values, seen = run(x) if self.recompute else self.attended(x)
        logits = self.out(seen).bfloat16()
        others = {"cache": (keys, values), "logits": (logits,), "sum": (seen + 1,)}
        return logits.float().pow(2).mean(), *others[self.returns]


def accumulating(
    returns: str,
    *,
    recompute: bool = False,
    frozen: bool = False,
    keeps: int = 0,
    teacher: bool = False,
    retain: bool = False,
) -> Step:
    """A step of micro-batches that ``keeps`` so many outputs in a list, or else nothing but a loss.

    Between forward and backward a ``teacher`` may run; backward may ``retain`` its graph.
    """
    net, kept = Attending(returns, recompute, frozen), list[Any]()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer, teaches = torch.optim.SGD(trained, foreach=False), nn.Linear(WIDTH, 2 * WIDE)

    def step() -> None:
        for _ in range(MICRO):
            output = net(torch.randn(ROWS, WIDTH))
            kept[:] = [*kept, output][-keeps:] if keeps else ()
            loss = output[0]
            del output
            with torch.no_grad():
                taught = teaches(torch.randn(ROWS, WIDTH)).mean() if teacher else 0
            (loss + taught).backward(retain_graph=retain)
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("returns", ["cache", "logits", "sum"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"keeps": 1},
        {"keeps": 3},
        {"recompute": True},
        {"frozen": True},
        {"teacher": True},
        {"retain": True},
    ],
)
def test_memory_is_as_if_all_ran(returns: str, how: dict[str, Any]) -> None:
    """Keys and values, 2 * 64 * 256 * 4 B, are alive until backward has read them, although nobody
    else holds them; logits are not, nor inputs of layers that are frozen. A graph that is retained
    holds them longer: then all passes run.
    """
    program, Attending.runs = partial(accumulating, returns, **how), 0
    found = captured(program, repeats=True)
    assert Attending.runs == (2 * MICRO if how.get("retain") else 3 + 1)
    whole = captured(program, repeats=False)
    assert launches(found) == launches(whole)
    assert (found.peak_bytes, found.held_bytes) == (whole.peak_bytes, whole.held_bytes)
