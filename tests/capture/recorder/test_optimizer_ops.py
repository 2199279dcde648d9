"""Ops of optimizers on fake tensors: which are answered without torch."""

from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from itercast.capture.recorder.fake_patches import MADE, READ, run_quickly

ADD = torch.ops.aten._foreach_add_.List


class Seen(TorchDispatchMode):
    """Notes the ops that reach torch."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpOverload] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_lists_are_written_over_without_torch_and_numbers_are_read() -> None:
    """Unknown ones of shapes that torch has seen; numbers that the program made torch counts on."""
    real = torch.tensor(3.0)
    with FakeTensorMode():
        some, others = ([torch.empty(n, 2) for n in (3, 4)] for _ in range(2))
        run_quickly(ADD, (some, others), {})
        one, two = torch.tensor(1.0), torch.tensor(2.0)
        with Seen() as seen:
            run_quickly(ADD, (some, others), {})
            assert run_quickly(READ, (two,), {}) == 2
            three = run_quickly(MADE, (real,), {})
            assert seen.ops == []
            run_quickly(ADD, ([one], [two]), {})
            assert seen.ops == [ADD]
        assert run_quickly(READ, (one,), {}) == 3
        assert isinstance(three, FakeTensor) and three.item() == 3
        three.add_(some[0].sum())  # whose numbers nobody knows
        assert three.constant is None


def test_lists_of_other_shapes_are_torchs_error() -> None:
    with FakeTensorMode():
        some, others = [torch.empty(3)], [torch.empty(4)]
        with pytest.raises(RuntimeError, match="broadcast"):
            run_quickly(ADD, (some, others), {})


def test_remembered_results_lie_where_torch_puts_them() -> None:
    """In memory of their own, in the first argument or in ``out``: the second time as the first."""
    aten = torch.ops.aten
    with FakeTensorMode():
        for _ in range(2):
            x, y, out = (torch.empty(3, 5) for _ in range(3))
            assert run_quickly(aten.mul.out, (x, y), {"out": out}) is out
            assert run_quickly(aten.mul_.Tensor, (x, y), {}) is x
            new = run_quickly(aten.mul.Tensor, (x, y), {})
            assert (new.shape, new.stride(), new.dtype) == ((3, 5), (5, 1), torch.float32)
            assert new.untyped_storage()._cdata not in {t.untyped_storage()._cdata for t in (x, y)}
            part = run_quickly(aten.select.int, (x, 0, 1), {})
            assert part.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert (part.shape, part.storage_offset()) == ((5,), 5)
