"""Products with sparse matrices: counted by hand, built, captured and priced."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from op_calls import described, logged
from torch import nn
from unseen_ops import GPU, MODELS, learned

from itercast.capture.opcall import OpCall, TensorSpec
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import UNMODELLED, PricedOp, priceable
from itercast.extras.graphs.sparse import FAMILY, Sparse, bytes_moved, cached_bytes
from itercast.extras.lookups.random_streams import HIT_COST, HOLDS_ROWS
from itercast.microbench.hardware.spec import gpu_names, load_gpu
from itercast.microbench.ops import families, find_family

NODES, EDGES = 40, 160


def graph(layout: str) -> torch.Tensor:
    """A random graph's adjacency matrix; edges drawn twice are one."""
    torch.manual_seed(0)
    index = torch.randint(0, NODES, (2, EDGES))
    matrix = torch.sparse_coo_tensor(index, torch.rand(EDGES), (NODES, NODES)).coalesce()
    return matrix.to_sparse_csr() if layout == "csr" else matrix


class Gcn(nn.Module):
    """Two layers of a graph convolutional network: A relu(A x W) W."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.sparse.mm(matrix, self.first(x)))
        return torch.sparse.mm(matrix, self.second(hidden))


def captured(matrix: torch.Tensor) -> list[OpCall]:
    """All calls of a forward and a backward."""
    x = torch.randn(NODES, 16)
    return logged(lambda: Gcn()(x, matrix).sum().backward())


def products(matrix: torch.Tensor) -> list[Any]:
    """What family ``sparse`` makes of the captured calls."""
    found = map(find_family, captured(matrix))
    return [params for family, params in found if family is FAMILY]


def test_rows_of_the_dense_matrix_are_read_again_where_no_cache_holds_them() -> None:
    """500 values in 10 columns, dense rows of 128 bytes; all 10 are drawn, and miss once at least.

    A cache of 10 rows hits the other 490 times. One of a row's size hits whenever that row is
    drawn again, 49 of 50 times: 451 rows miss.
    """
    p = Sparse(rows=7, cols=10, nnz=500, width=32)
    large, tiny = (replace(GPU, l2_bytes=n * 128 / HOLDS_ROWS) for n in (10, 1))
    assert bytes_moved(p) == 500 * 4 + 8 * (500 + 7 + 1) + (10 + 7) * 128
    again = cached_bytes(p, large) - bytes_moved(p)
    assert again == pytest.approx(490 * HIT_COST * 128, rel=1e-3)
    again = cached_bytes(p, tiny) - bytes_moved(p)
    assert again == pytest.approx((441 + 49 * HIT_COST) * 128, rel=1e-3)


@pytest.mark.parametrize("op", ["spmm", "sddmm"])
def test_more_values_or_columns_are_never_faster_on_any_gpu(op: str) -> None:
    """Nor is any product below the lower bound, a matrix that is read a little included."""
    sizes = np.unique(np.geomspace(1, 4096, 40).astype(int))
    for gpu in (load_gpu(name) for name in gpu_names() if name != "cpu"):
        for rows, nnz in ((1000, 50), (1000, 1000), (200_000, 5_000_000)):
            p = Sparse(op=op, rows=rows, cols=rows, nnz=nnz, width=1)
            for grown in (
                [replace(p, width=int(width)) for width in sizes],
                [replace(p, width=64, nnz=int(nnz * n / 16)) for n in sizes if nnz * n >= 16],
            ):
                moved = np.array([cached_bytes(q, gpu) for q in grown], dtype=float)
                assert (np.diff(moved) > -1e-9 * moved[1:]).all()
                assert (moved >= [bytes_moved(q) for q in grown]).all()


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_a_built_product_is_captured_as_what_it_was_built_from(layout: str, skew: float) -> None:
    p = Sparse(rows=30, cols=20, nnz=90, width=8, layout=layout, skew=skew)
    run = FAMILY.build(p, "cpu").run
    result: Any = run()
    assert result.shape == (30, 8)
    assert [q for q in described(run) if isinstance(q, Sparse)] == [replace(p, skew=0.0)]


def test_a_built_sampled_product_keeps_the_pattern() -> None:
    p = Sparse(op="sddmm", rows=30, cols=20, nnz=90, width=8)
    run = FAMILY.build(p, "cpu").run
    result: Any = run()
    assert result.layout == torch.sparse_csr and result.values().numel() == 90
    assert described(run) == [p]


def test_a_dense_matrix_times_a_sparse_one_is_the_transposed_product() -> None:
    """(5, 3) @ csr (3, 4) costs what csc (4, 3) @ (3, 5) does."""
    dense = TensorSpec(shape=(5, 3), dtype="fp32")
    matrix = TensorSpec(shape=(3, 4), dtype="fp32", layout="csr", nnz=6)
    call = OpCall(op="aten.mm.default", args=(dense, matrix))
    assert find_family(call)[1] == Sparse(rows=4, cols=3, nnz=6, width=5, layout="csc")


def test_dense_families_never_see_sparse_calls() -> None:
    """A dense product is gemm's, one with a sparse factor is not, nor is a sum of two graphs."""
    dense = TensorSpec(shape=(4, 4), dtype="fp32")
    matrix = TensorSpec(shape=(4, 4), dtype="fp32", layout="csr", nnz=6)
    asked = {"mm.default": (dense, dense), "addmm.default": (dense, matrix, dense)}
    asked["add.Tensor"] = (matrix, matrix)
    found = [find_family(OpCall(op=f"aten.{op}", args=args))[0] for op, args in asked.items()]
    assert found == [families()["gemm"], FAMILY, None]


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_a_graph_network_multiplies_by_its_matrix_forward_and_backward(layout: str) -> None:
    """Widths 8 and 4, then back; the backward of CSR multiplies by its transpose.

    Weights of edges get their gradients from sampled products, one for each layer.
    """
    matrix = graph(layout)
    sizes = {"rows": NODES, "cols": NODES, "nnz": len(matrix.values())}
    back = "csc" if layout == "csr" else "coo"
    widths = ((8, layout), (4, layout), (4, back), (8, back))
    assert products(matrix) == [Sparse(width=w, layout=kind, **sizes) for w, kind in widths]
    found = products(graph("csr").requires_grad_())
    assert [p.width for p in found if p.op == "sddmm"] == [4, 8]


class Recorded:
    """Everything takes 10 us in families with a model; notes which rows were priced."""

    digest = ""

    def __init__(self, **models: Any) -> None:
        self.models = {**MODELS, **models}

    def price(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> pd.DataFrame:
        us = pd.Series(10.0, index=rows.index)
        columns = {"predicted_us": us, "predicted_us_p10": us, "predicted_us_p90": us}
        return pd.DataFrame({**columns, "in_envelope": True})

    def inside(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> list[bool]:
        return [True] * len(rows)


def priced(**models: Any) -> list[PricedOp]:
    """The sparse products of a captured step, priced with these models besides the usual ones."""
    calls = [c for c in captured(graph("csr")) if find_family(c)[0] is FAMILY]
    book = PriceBook(Recorded(**models), GPU, 0)
    return book.price([priceable(c, cold=0.0) for c in calls])


def test_a_graph_network_is_priced_by_the_family_s_model() -> None:
    """Without one a GPU takes as long as its bytes, unmodelled, also where gathers have a model."""
    ops = priced(sparse=learned("spmm"))
    assert [(op.family, op.duration_us) for op in ops] == [("sparse", 10.0)] * 4
    assert {op.family for op in priced(index=learned("index_select"))} == {UNMODELLED}
