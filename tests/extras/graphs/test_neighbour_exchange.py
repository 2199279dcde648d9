"""Graphs cut among ranks: what a rank reads, sends and computes, counted by hand."""

import math
from typing import Any

import pytest
import torch
from law_case import outcome
from torch import nn

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.predict import predict
from itercast.extras.graphs.neighbour_exchange import cut_graph
from itercast.microbench.ops import find_family

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
VERTICES, EDGES, FEATURES, WIDTH = 1000, 8000, 24, 16
CUT = "dp=4,cut=0.5:0.4"  # 250 own vertices of a rank, 100 of its halo, 2,000 edges


class Net(nn.Module):
    """Two layers that sum over neighbours: by a sparse matrix, or by edge."""

    def __init__(self, by_edge: bool) -> None:
        super().__init__()
        self.by_edge = by_edge
        self.a, self.b = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)

    def total(self, x: torch.Tensor, graph: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if not self.by_edge:
            return torch.sparse.mm(graph[0], x)
        return torch.zeros_like(x).index_add(0, graph[1], x.index_select(0, graph[0]))

    def forward(self, x: torch.Tensor, *graph: torch.Tensor) -> torch.Tensor:
        return self.total(self.b(torch.relu(self.total(self.a(x), graph))), graph)


def step(by_edge: bool = False, **options: Any) -> StepCapture:
    edges = torch.arange(EDGES).unsqueeze(0) * torch.tensor([[7], [1]]) % VERTICES
    starts = torch.arange(VERTICES + 1) * (EDGES // VERTICES)
    csr = torch.sparse_csr_tensor(starts, edges[0], torch.ones(EDGES), (VERTICES, VERTICES))
    inputs = (torch.zeros(VERTICES, FEATURES), *(edges if by_edge else (csr,)))
    return capture(Net(by_edge), inputs, lambda x: x.sum(), **options)


def cut(found: StepCapture, plan: str = CUT) -> StepCapture:
    parsed = ParallelPlan.parse(plan)
    (pair,) = parsed.more
    return cut_graph(found, parsed, pair[1])  # type: ignore[arg-type]


def messages(found: StepCapture) -> list[tuple[str, int, float]]:
    """Phase, bytes of halo rows, and the buffer over them."""
    sent = [c for c in found.calls if c.op == COLLECTIVE and c.kwargs["kind"] == "all_to_all"]
    return [(c.phase, c.args[0].nbytes, c.kwargs["scale"]) for c in sent]


@pytest.mark.parametrize("by_edge", [False, True])
def test_features_of_the_halo_come_before_each_layer_and_their_gradients_return(
    by_edge: bool,
) -> None:
    """100 rows of 16 floats a layer; the buffer of four ranks has a part for the rank itself."""
    rows = 100 * WIDTH * 4
    found = cut(step(by_edge))
    assert messages(found) == [
        ("forward", rows, 4 / 3),
        ("forward", rows, 4 / 3),
        ("backward", rows, 4 / 3),
        ("backward", rows, 4 / 3),
    ]
    inferred = messages(cut(step(by_edge, mode="infer")))
    assert inferred == [("forward", rows, 4 / 3)] * 2


def test_a_rank_has_its_rows_of_the_matrix_with_columns_for_its_halo() -> None:
    products = [
        p for c in cut(step()).calls for f, p in [find_family(c)] if f and f.name == "sparse"
    ]
    assert [(p.rows, p.cols, p.nnz) for p in products] == [
        *[(250, 350, 2000)] * 2,
        *[(350, 250, 2000)] * 2,
    ]


def test_own_vertices_are_summed_beside_the_exchange() -> None:
    """Half of 2,000 edges come from own vertices, the others from 100 of the halo.

    A message of 6.25 KiB takes 8.3 us, a gather or sum by edge 10: four messages are hidden.
    """
    found = cut(step(), f"{CUT}:overlap")
    pairs = map(find_family, found.calls)
    products = [p for f, p in pairs if f and f.name == "sparse"]
    assert [(p.rows, p.cols, p.nnz) for p in products] == [
        *[(250, 250, 1000), (250, 100, 1000)] * 2,
        *[(100, 250, 1000), (250, 250, 1000)] * 2,
    ]
    assert messages(found) == messages(cut(step()))
    after, beside = (outcome(step(by_edge=True), CUT + key) for key in ("", ":overlap"))
    hidden_us = 4 * 100 * WIDTH * 4 / 1024 * 4 / 3
    assert after.exposed_comm_us - beside.exposed_comm_us == pytest.approx(hidden_us, rel=1e-4)


@pytest.mark.parametrize("by_edge", [False, True])
def test_all_ranks_together_do_the_products_of_one_process(by_edge: bool) -> None:
    def flops(found: StepCapture) -> float:
        pairs = [find_family(c) for c in found.calls if c.phase != "optimizer"]
        return sum(float(f.flops(p)) for f, p in pairs if f and f.name in ("gemm", "sparse"))

    whole = step(by_edge)
    assert 4 * flops(cut(whole)) == 4 * flops(cut(whole, f"{CUT}:overlap")) == flops(whole)
    assert cut(whole).parameters[0].shape == whole.parameters[0].shape


def test_without_a_counted_halo_its_vertices_are_expected_of_the_cut() -> None:
    """1,000 of a rank's 2,000 edges come from 750 others: 750 * (1 - exp(-1000/750)) = 552."""
    found = messages(cut(step(), "dp=4,cut=0.5"))
    assert found[0][1] == round(750 * (1 - math.exp(-1000 / 750))) * WIDTH * 4 == 552 * 64
    everything = messages(cut(step(), "dp=4,cut=1:5"))
    assert everything[0][1] == 750 * 64  # no more than there are


def test_a_smaller_halo_is_faster_and_more_ranks_do_less_each() -> None:
    plans = ("dp=2,cut=0.5:0.9", "dp=2,cut=0.5:0.1", "dp=8,cut=0.5:0.1")
    found = [predict(step(), gpu="h100-sxm-80gb", plan=p) for p in plans]
    assert found[0].comm_us > found[1].comm_us
    assert found[0].memory_bytes > found[1].memory_bytes > found[2].memory_bytes


def test_a_model_without_a_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="cut is of a graph, and the model has none"):
        predict("mlp-s", gpu="h100-sxm-80gb", plan="dp=2,cut=0.5")
