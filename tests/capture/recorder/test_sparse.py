"""Sparse tensors in a capture: the same ops, shapes and stored values as in a real step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_calls import sequence
from torch import nn

from itercast.capture.cases.external.user_module import UserModel, capture_user_model
from itercast.capture.opcall import ParamSpec, StepCapture, TensorSpec
from itercast.capture.recorder.cache import dumps, loads
from itercast.capture.recorder.log import capture_step
from itercast.capture.step import StepSettings

NODES, EDGES, FEATURES = 6, 13, 4  # 6 nodes with a loop each, 7 edges more


def adjacency(layout: str = "csr") -> torch.Tensor:
    """Loops, the edges i -> i + 1, and the two edges 0 -> 3 and 2 -> 5."""
    dense = torch.eye(NODES) + torch.diag(torch.ones(NODES - 1), 1)
    dense[0, 3] = dense[2, 5] = 2.0
    return dense.to_sparse_csr() if layout == "csr" else dense.to_sparse()


class GraphNet(nn.Module):
    """Two graph convolutions (arXiv:1609.02907): A @ relu(A @ x @ W1) @ W2, by several ops."""

    def __init__(self, product: str = "sparse.mm") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, 3)
        self.product = product

    def spread(self, adj: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Each node's sum over its neighbours."""
        if self.product == "sparse.mm":
            return torch.sparse.mm(adj, x)
        return torch.sparse.addmm(x, adj, x) if self.product == "addmm" else adj @ x

    def forward(self, x: torch.Tensor, adj: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.spread(adj, self.first(x)))
        return self.spread(adj, self.second(hidden))


class Attention(nn.Module):
    """Scores at the edges alone (SDDMM), as weights of a product with the neighbours (SpMM)."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8)

    def forward(self, x: torch.Tensor, adj: torch.Tensor) -> torch.Tensor:
        key = self.key(x)
        scores = torch.sparse.sampled_addmm(adj, key, key.t(), beta=0.0)
        return torch.sparse.mm(scores, self.value(x))


class EdgeWeights(nn.Module):
    """Edge weights that are learned, put into a COO matrix and coalesced in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(EDGES))
        self.register_buffer("edges", adjacency("coo").indices())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adj = torch.sparse_coo_tensor(self.edges, self.weight, (NODES, NODES)).coalesce()
        return torch.sparse.mm(adj, x)


class Converted(nn.Module):
    """A COO matrix converted to CSR, scaled and transposed in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 8)

    def forward(self, x: torch.Tensor, adj: torch.Tensor) -> torch.Tensor:
        csr = adj.coalesce().to_sparse_csr() * 0.5
        return csr.t() @ (csr @ self.linear(x))


class SparseWeight(nn.Module):
    """A sparse matrix of weights that is trained."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(adjacency(layout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.weight, x)


MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    **{
        f"{p}, {layout}": (lambda p=p: GraphNet(p), layout, "adamw")
        for p in ("sparse.mm", "addmm", "@")
        for layout in ("csr", "coo")
    },
    "attention, csr": (Attention, "csr", "adamw"),
    "edge weights": (EdgeWeights, "", "adamw"),
    "converted": (Converted, "coo", "adamw"),
    "csr weight": (lambda: SparseWeight("csr"), "", "sgd"),
    "coo weight": (lambda: SparseWeight("coo"), "", "sgd"),
}


def capture(name: str, fake: bool) -> StepCapture:
    """A training step, on fake tensors or run for real."""
    build, layout, optimizer = MODELS[name]
    inputs: dict[str, Any] = {"x": torch.randn(NODES, FEATURES, requires_grad=True)}
    if layout:
        inputs["adj"] = adjacency(layout)
    settings = StepSettings(optimizer=optimizer)
    if not fake:
        return capture_step(
            build, lambda: inputs, lambda y, _: y.square().sum(), settings, fake=False
        )
    made = UserModel(module=build(), inputs=inputs, loss=lambda y: y.square().sum())
    return capture_user_model(lambda: made, settings)


@pytest.mark.parametrize("name", MODELS)
def test_a_sparse_step_is_captured_as_it_runs(name: str) -> None:
    """Every op, shape, stride, layout and nnz of forward, backward and optimizer."""
    fake, real = (capture(name, fake=f) for f in (True, False))
    for ours, theirs in zip(sequence(fake), sequence(real), strict=False):
        assert ours == theirs
    assert sequence(fake) == sequence(real)
    assert [(p.layout, p.nnz) for p in fake.parameters] == [
        (p.layout, p.nnz) for p in real.parameters
    ]


def test_a_graph_network_by_hand() -> None:
    """A product with the neighbours per layer, and per layer one with the transpose back."""
    calls = capture("sparse.mm, csr", fake=True).calls
    sparse = [(c, t) for c in calls for t in c.tensors() if t.layout]
    assert [(c.op, c.phase, t.layout) for c, t in sparse] == [
        ("aten._sparse_addmm.default", "forward", "csr"),
        ("aten._sparse_addmm.default", "forward", "csr"),
        ("aten.mm.default", "backward", "csc"),
        ("aten.mm.default", "backward", "csc"),
    ]
    assert {(t.shape, t.nnz) for _, t in sparse} == {((NODES, NODES), EDGES)}
    assert len({t.storage for _, t in sparse}) == 1  # a transpose is a view


def test_bytes_of_sparse_tensors() -> None:
    """Values and int64 indices, by hand."""
    csr = TensorSpec(shape=(6, 5), dtype="fp32", layout="csr", nnz=13)
    assert csr.numel == 13
    assert csr.nbytes == 13 * 4 + (13 + 7) * 8  # a column of each value, 6 + 1 row pointers
    csc = TensorSpec(shape=(6, 5), dtype="bf16", layout="csc", nnz=13)
    assert csc.nbytes == 13 * 2 + (13 + 6) * 8
    coo = TensorSpec(shape=(6, 5), dtype="fp32", layout="coo", nnz=13)
    assert coo.nbytes == 13 * 4 + 2 * 13 * 8  # row and column of each value
    weight = ParamSpec(
        name="w", shape=(6, 5), dtype="fp32", storage=0, ready_after=-1, layout="coo", nnz=13
    )
    assert weight.nbytes == coo.nbytes


@pytest.mark.parametrize("name", ["csr weight", "coo weight"])
def test_stored_captures_keep_sparse_tensors(name: str) -> None:
    step = capture(name, fake=True)
    assert loads(dumps(step)) == step
    assert step.parameters[0].nnz == EDGES


def own(make: Callable[[], UserModel]) -> StepCapture:
    return capture_user_model(make, StepSettings())


def test_a_function_may_make_a_csr_matrix_of_its_parts() -> None:
    """Made without data, for a graph larger than memory."""
    nodes, edges = 2**30, 2**36

    def make() -> UserModel:
        pointers = torch.zeros(nodes + 1, dtype=torch.int64)
        indices, values = torch.zeros(edges, dtype=torch.int64), torch.ones(edges)
        adj = torch.sparse_csr_tensor(pointers, indices, values, (nodes, nodes))
        return UserModel(
            module=GraphNet(), inputs=(torch.randn(nodes, FEATURES), adj), loss=lambda y: y.sum()
        )

    products = [c for c in own(make).calls if c.op == "aten._sparse_addmm.default"]
    assert [c.args[1].nnz for c in products] == [edges, edges]


def test_a_function_may_convert_a_dense_matrix() -> None:
    """Its values are needed: it is called with data."""

    def make() -> UserModel:
        inputs = (torch.randn(NODES, FEATURES), adjacency("csr"))
        return UserModel(module=GraphNet(), inputs=inputs, loss=lambda y: y.sum())

    assert {t.nnz for c in own(make).calls for t in c.tensors() if t.layout} == {EDGES}


class Dense(nn.Linear):
    """Converts a dense matrix in every step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(x.to_sparse_csr(), self.weight)


def test_a_step_that_converts_a_dense_matrix_is_refused() -> None:
    x = torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"depends on data in aten\._to_sparse_csr\.default"):
        own(lambda: UserModel(module=Dense(4, 4), inputs={"x": x}, loss=lambda y: y.sum()))


class BlockWeight(nn.Module):
    """A weight of 2 x 2 blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4).to_sparse_bsr(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


def test_unknown_layouts_are_named() -> None:
    """In a module, among the inputs, and inside a step."""
    x = torch.randn(4, 4)
    only = "captures describe sparse_coo and sparse_csr only"
    with pytest.raises(ValueError, match=f"^BlockWeight.weight has layout sparse_bsr: {only}$"):
        own(lambda: UserModel(module=BlockWeight(), inputs=x))
    with pytest.raises(ValueError, match=f"^input adj has layout sparse_csc: {only}$"):
        own(lambda: UserModel(module=GraphNet(), inputs={"x": x, "adj": x.to_sparse_csc()}))
    with pytest.raises(ValueError, match=f"^parameter weight has layout sparse_bsr: {only}$"):
        capture_step(
            BlockWeight, lambda: {"x": x}, lambda y, _: y.sum(), StepSettings(), fake=False
        )
