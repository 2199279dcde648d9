"""Operands of a timed call, written anew by one core."""

from typing import Any

import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

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


def test_what_subclasses_wrap_is_no_operand() -> None:
    """As of DTensor, whose Python a sweep times: it has no memory of its own."""
    pair, weight = TwoTensor(torch.randn(100), torch.randn(100)), torch.randn(50)
    rewrite = rewritten_by_one_core(lambda: (pair + 1, weight + 1))
    assert rewrite is not None
    with Additions() as additions:
        rewrite()
    assert additions.numels == [50]
