"""Sparse gradients of tables and the optimizer's step on them: counts by hand, what really runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops.family import Part, Workload
from itercast.microbench.ops.lookup import embedding_bag, sparse_update
from itercast.microbench.ops.lookup.embedding_bag import EmbeddingBag
from itercast.microbench.ops.lookup.index_calls import IndexOp
from itercast.microbench.ops.lookup.random_streams import draw_rows
from itercast.microbench.ops.lookup.sparse_update import SparseUpdate

# 6 lookups of 4 columns in a table of 10 rows, which touch 3 rows 1, 2 and 3 times
UPDATE = SparseUpdate(op="sgd", rows=10, dim=4, lookups=6, unique=3, reuse="0.3333 0.3333 0.3333")


class Seen:
    """What a fallback may ask: a CPU whose rows show some ops."""

    gpu = Gpu(name="toy", kind="cpu", peak_flops_per_s={"fp32": 1e12})
    channels_last = False

    def __init__(self, *ops: str) -> None:
        self.ops = ops

    def has_model(self, family: str) -> bool:
        return True

    def seen(self, family: str, op: str, dtype: str) -> bool:
        return op in self.ops

    measured_here = seen

    def software_shares(self, family: str, op: str, dtype: str) -> dict[str, float]:
        return {}


def test_flops_and_bytes_of_updates_by_hand() -> None:
    """SGD multiplies and adds; Adagrad's nine passes are over the three touched rows alone."""
    assert sparse_update.flops(UPDATE) == 2 * 6 * 4
    assert sparse_update.bytes_moved(UPDATE) == 3 * 6 * 4 * 4 + 6 * 8
    adagrad = replace(UPDATE, op="adagrad")
    assert sparse_update.flops(adagrad) == 2 * 6 * 4 + 6 * 3 * 4
    assert sparse_update.bytes_moved(adagrad) == (3 * 6 + 9 * 3) * 4 * 4 + 6 * 8


def test_a_sparse_gradient_moves_no_table() -> None:
    """2 bags of 4 columns are read, 6 rows written: 8 rows of 16 bytes, 6 + 2 row numbers."""
    p = EmbeddingBag(op="sparse_backward", rows=10**6, dim=4, bags=2, lookups=6)
    assert embedding_bag.bytes_moved(p) == 8 * 16 + 8 * 8
    assert embedding_bag.flops(p) == 0


@pytest.mark.parametrize("op", sparse_update.OPS)
def test_what_is_timed_is_the_optimizer_s_step(op: str) -> None:
    """One run changes exactly the rows that the gradient touches."""
    torch.manual_seed(0)
    p = replace(UPDATE, op=op, rows=50)
    index = draw_rows(p, "cpu").unsqueeze(0)
    table, gradient = sparse_update.operands(p, index, "cpu")
    before = table.detach().clone()
    sparse_update.optimizer_step(op, table, gradient)()
    assert int((table != before).any(dim=1).sum()) == 3


def test_a_timed_sparse_backward_is_autograd_s() -> None:
    """Its gradient adds up to the dense one."""
    torch.manual_seed(0)
    p = EmbeddingBag(op="sparse_backward", rows=12, dim=4, bags=3, lookups=9, skew=1.0)
    gradient = embedding_bag.build(p, "cpu").run()
    assert isinstance(gradient, torch.Tensor) and gradient.is_sparse and gradient._nnz() == 9
    torch.manual_seed(0)
    dense = embedding_bag.build(replace(p, op="backward"), "cpu").run()
    assert isinstance(dense, torch.Tensor)
    assert torch.allclose(gradient.to_dense(), dense)
    bag = torch.randn(12, 4, requires_grad=True)
    F.embedding_bag(torch.tensor([1, 1]), bag, torch.tensor([0]), sparse=True).sum().backward()
    assert bag.grad is not None and bag.grad._nnz() == 2  # a row per lookup, also of equal rows


def test_updates_are_swept_with_all_optimizers_and_streams() -> None:
    points = list(islice(sparse_update.sweep(), 300))
    assert {p.op for p in points} == set(sparse_update.OPS)
    kinds = {(p.skew > 0, p.repeats > 0, p.reuse != "") for p in points}
    assert len(kinds) == 4  # uniform, Zipf, as a trace, by histogram
    assert {p.dim for p in points} >= set(sparse_update.USUAL_DIMS)


def test_unseen_updates_are_additions_and_copies() -> None:
    """Where no rows show it: index_add_, and for Adagrad nine passes over the touched rows."""
    add = IndexOp(op="index_add_", outer=1, size=6, inner=4, source=10)
    assert sparse_update.fallback(UPDATE, Seen()) == [Part(family="index", params=add)]
    assert sparse_update.fallback(UPDATE, Seen("sgd")) == []
    first, second = sparse_update.fallback(replace(UPDATE, op="adagrad"), Seen("sgd"))
    assert first == Part(family="index", params=add)
    assert second.params.numel > 0 and second.family == "elementwise"


def test_an_unseen_sparse_backward_is_a_gather() -> None:
    p = EmbeddingBag(op="sparse_backward", rows=100, dim=4, bags=2, lookups=6)
    gather = IndexOp(op="index_select", outer=1, size=6, inner=4, source=2)
    assert embedding_bag.fallback(p, Seen()) == [Part(family="index", params=gather)]
    assert embedding_bag.fallback(p, Seen("sparse_backward")) == []
    assert embedding_bag.fallback(replace(p, op="backward"), Seen()) == []


def test_features_tell_optimizers_and_reuse_apart() -> None:
    gpu = load_gpu("h100-sxm-80gb")
    found = sparse_update.features(UPDATE, gpu)
    assert found["op"] == "sgd"
    assert found["log_unique"] == pytest.approx(np.log2(3))
    assert found["log_reuse"] == pytest.approx(1)


@pytest.mark.parametrize("op", embedding_bag.OPS)
def test_several_tables_are_looked_up_one_after_the_other(op: str) -> None:
    """A run of three tables is three calls, each as much work as a call on one table."""
    one = EmbeddingBag(op=op, rows=10, dim=4, bags=2, lookups=6)
    three = replace(one, tables=3)
    with calls_of(embedding_bag.build(three, "cpu")) as seen:
        assert sum("_embedding_bag" in name for name in seen) >= 3
    assert embedding_bag.build(three, "cpu").calls == 3
    assert embedding_bag.bytes_moved(three) == embedding_bag.bytes_moved(one)


def test_each_of_several_tables_is_updated() -> None:
    """SGD adds to three tables in a run; sizes are those of one."""
    three = replace(UPDATE, tables=3)
    workload = sparse_update.build(three, "cpu")
    with calls_of(workload) as seen:
        assert sum("add_" in name for name in seen) == 3
    assert workload.calls == 3
    assert sparse_update.bytes_moved(three) == sparse_update.bytes_moved(UPDATE)
    gpu = load_gpu("a100-sxm-80gb")
    assert sparse_update.features(three, gpu)["log_tables"] == pytest.approx(np.log2(3))


@contextmanager
def calls_of(workload: Workload) -> Iterator[list[str]]:
    """Names of the ops that one run calls."""
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log():
        workload.run()
    yield seen
