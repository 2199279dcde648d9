"""Results of ops on tensors without data are remembered by the forms of their arguments."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from itercast.capture.recorder.fake_patches import behave_like_real_tensors
from itercast.capture.recorder.replaced.remembered import results, run_remembered

ATEN = torch.ops.aten


def test_a_product_of_one_slice_is_that_of_another() -> None:
    """Seven slices of a table lie in seven places; six of their products are found by the first.

    The product in another dtype is another one.
    """
    results.clear()
    with FakeTensorMode(), behave_like_real_tensors():
        table = torch.empty(7, 4, 4)
        slices = [table[i] for i in range(7)]
        products = [run_remembered(ATEN.mm.default, (one, one), {}) for one in slices]
        half = run_remembered(ATEN.mm.default, (slices[0].half(), slices[0].half()), {})
    assert len(results) == 2 and half.dtype == torch.float16
    assert [one.storage_offset() for one in slices] == [16 * i for i in range(7)]
    assert {(tuple(one.shape), one.dtype, one.storage_offset()) for one in products} == {
        ((4, 4), torch.float32, 0)
    }
    assert len({one.untyped_storage()._cdata for one in products}) == 7


def test_what_an_op_writes_over_or_shares_is_the_memory_that_it_was_given() -> None:
    """A sum in place returns its first argument; a number 1 is not True; one asks for numbers."""
    results.clear()
    with FakeTensorMode(), behave_like_real_tensors():
        x, y = torch.empty(3), torch.empty(3)
        for one in (x, y):
            assert run_remembered(ATEN.add_.Tensor, (one, x), {}) is one
            same = run_remembered(ATEN._reshape_alias.default, (one, [3], [1]), {})
            assert same.untyped_storage()._cdata == one.untyped_storage()._cdata
        integers = torch.empty(3, dtype=torch.int64)
        kinds = [run_remembered(ATEN.mul.Scalar, (integers, n), {}).dtype for n in (1, 1.0, True)]
    assert kinds == [torch.int64, torch.float32, torch.int64]
