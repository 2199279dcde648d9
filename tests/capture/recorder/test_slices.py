"""Ops on one slice after another are worked out once."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from itercast.capture.recorder.fake_patches import behave_like_real_tensors


def test_a_product_of_one_slice_is_that_of_another() -> None:
    """Seven slices of a table lie in seven places; six of their products are found by the first."""
    with FakeTensorMode(), behave_like_real_tensors():
        table = torch.empty(7, 4, 4)
        slices = [table[i] for i in range(7)]
        FakeTensorMode.cache_clear()
        products = [torch.mm(one, one) for one in slices]
        found = FakeTensorMode.cache_info()
    assert (found.misses, found.hits) == (1, 6)
    assert [one.storage_offset() for one in slices] == [16 * i for i in range(7)]
    assert {one.storage_offset() for one in products} == {0}
