"""Operands of a timed call, written anew by one core."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from itercast.microbench.ops.family import Workload
from itercast.microbench.timing import clock as clock_module
from itercast.microbench.timing.clock import Clock
from itercast.microbench.timing.operands import PIECE, rewritten_by_one_core


class Additions(TorchDispatchMode):
    """Elements of each tensor that is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.numels += [t.numel() for t in args[0]]
        return func(*args, **(kwargs or {}))


def test_all_that_a_call_reads_is_written_unchanged_in_pieces_of_one_thread() -> None:
    """50,000 elements are four pieces of at most 16,384; what the call makes is left alone."""
    x, weight = torch.randn(50_000), torch.randn(100, requires_grad=True)
    before = x.clone()
    rewrite = rewritten_by_one_core(lambda: (torch.neg(x).exp(), weight * 2))
    assert rewrite is not None
    with Additions() as additions:
        rewrite()
    assert additions.numels == [PIECE, PIECE, PIECE, 50_000 - 3 * PIECE, 100]
    assert torch.equal(x, before)
    weight.sum().backward()  # autograd has not seen the writes


@pytest.mark.parametrize(
    "x",
    [torch.arange(100), torch.ones(1).expand(100), torch.ones(2**22)],
    ids=["integers", "fewer elements than it shows", "16 MiB, more than cores keep"],
)
def test_other_operands_stay_as_they_are(x: torch.Tensor) -> None:
    assert rewritten_by_one_core(x.neg) is None


def test_one_core_has_all_data_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm times of several threads follow a rewrite of the operands, those of one do not."""
    asked: list[object] = []
    monkeypatch.setattr(clock_module, "rewritten_by_one_core", asked.append)
    op = Workload(run=torch.ones(8).neg)
    for threads in (1, 2):
        Clock(threads, {"0.5": 1.0}).time_warm(op)
    assert asked == [op.run]
