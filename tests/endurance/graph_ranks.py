"""Measures training steps of full-graph networks in one and in two processes, and forecasts them.

Run ``python tests/endurance/graph_ranks.py measure TIMES`` on two cores (a minute), then the same
with ``BUNDLE TIMES``. In two processes the graph is cut: each has half of the vertices, exchanging
features of its halo over gloo. ``points FILE`` writes all points, for ``itercast collect``.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.parallel.neighbour_exchange import cut_graph, cut_of
from itercast.compose.predict import predict
from itercast.microbench.ops import families, find_family
from itercast.microbench.processes.ranks import join_process_group, max_over_ranks, start_ranks
from itercast.microbench.sweep.captured_points import write_points
from itercast.microbench.timing.clock import keep_freed_memory

# Network, vertices, edges of each, features, width, and how far neighbours are (0: anywhere).
CASES = {
    "gcn": ("Gcn", 20_000, 16, 64, 128, 0),
    "gcn-near": ("Gcn", 20_000, 16, 64, 128, 500),
    "sage": ("Sage", 16_000, 12, 96, 96, 0),
    "sage-near": ("Sage", 30_000, 8, 64, 64, 1000),
    "gin": ("Gin", 16_000, 10, 64, 96, 0),
    "edges": ("Edges", 8_000, 8, 64, 64, 0),
    "edges-near": ("Edges", 10_000, 10, 32, 64, 300),
    "gat": ("Gat", 6_000, 8, 64, 64, 0),
}
CLASSES, ROUNDS, WARMUP = 16, 40, 4


class Exchange(torch.autograd.Function):
    """Own rows and those of the halo; in backward the gradients of the halo return."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: torch.Tensor, counts: Any) -> torch.Tensor:
        ctx.sent, ctx.counts, ctx.own = sent, counts, len(x)
        received = x.new_empty((sum(counts[1]), *x.shape[1:]))
        dist.all_to_all_single(received, x.index_select(0, sent), counts[1], counts[0])
        return torch.cat((x, received))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        back = grad.new_empty((len(ctx.sent), *grad.shape[1:]))
        dist.all_to_all_single(back, grad[ctx.own :].contiguous(), *ctx.counts)
        added = torch.zeros_like(grad[: ctx.own]).index_add_(0, ctx.sent, back)
        return grad[: ctx.own] + added, None, None


class Layers(nn.Module):
    """Two layers of a graph network with a ReLU between; ``whole`` adds rows of the halo."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.whole: Any = lambda x: x
        self.made = nn.ModuleList(
            self.layer(a, b) for a, b in ((features, width), (width, CLASSES))
        )

    def layer(self, a: int, b: int) -> nn.Module:
        return nn.Linear(a, b)

    def forward(self, x: torch.Tensor, *graph: torch.Tensor) -> torch.Tensor:
        first, last = self.made
        return self.step(last, torch.relu(self.step(first, x, *graph)), *graph)

    def step(self, layer: Any, x: torch.Tensor, *graph: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Gcn(Layers):
    def step(self, layer: Any, x: torch.Tensor, *graph: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(graph[0], self.whole(layer(x)))


class Sage(Layers):
    def layer(self, a: int, b: int) -> nn.Module:
        return nn.ModuleList((nn.Linear(a, b), nn.Linear(a, b)))

    def step(self, layer: Any, x: torch.Tensor, *graph: torch.Tensor) -> torch.Tensor:
        return layer[0](x) + torch.sparse.mm(graph[0], self.whole(layer[1](x)))


class Gin(Layers):
    def layer(self, a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))

    def step(self, layer: Any, x: torch.Tensor, *graph: torch.Tensor) -> torch.Tensor:
        return layer(1.1 * x + torch.sparse.mm(graph[0], self.whole(x)))


class Edges(Layers):
    def step(self, layer: Any, x: torch.Tensor, *graph: torch.Tensor) -> torch.Tensor:
        source, target = graph
        sent = self.whole(layer(x)).index_select(0, source)
        return sent.new_zeros(len(x), sent.shape[1]).index_add(0, target, sent)


class Gat(Layers):
    def layer(self, a: int, b: int) -> nn.Module:
        return nn.ModuleList((nn.Linear(a, b), nn.Linear(b, 1), nn.Linear(b, 1)))

    def step(self, layer: Any, x: torch.Tensor, *graph: torch.Tensor) -> torch.Tensor:
        source, target = graph
        h = layer[0](x)
        theirs = self.whole(layer[1](h)).index_select(0, source)
        score = nn.functional.leaky_relu(theirs + layer[2](h).index_select(0, target), 0.2).exp()
        total = score.new_zeros(len(x), 1).index_add(0, target, score)
        sent = self.whole(h).index_select(0, source) * (score / total.index_select(0, target))
        return h.new_zeros(len(x), h.shape[1]).index_add(0, target, sent)


def edges(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and targets of a random graph's edges, by target."""
    _, vertices, degree, _, _, near = CASES[name]
    rng = torch.Generator().manual_seed(0)
    target = torch.arange(vertices).repeat_interleave(degree)
    if near:
        away = torch.randint(-near, near + 1, target.shape, generator=rng)
        return (target + away).clamp(0, vertices - 1), target
    return torch.randint(0, vertices, target.shape, generator=rng), target


def made(name: str, rank: int = 0, ranks: int = 1) -> tuple[Layers, tuple[Any, ...], Any]:
    """The network, a rank's features and graph, and what it exchanges."""
    kind, vertices, degree, features, width, _ = CASES[name]
    torch.manual_seed(0)
    model: Layers = globals()[kind](features, width)
    source, target = edges(name)
    own = vertices // ranks
    first = rank * own
    exchange = None
    mine = target // own == rank
    if ranks > 1:  # rows of others by number; what others read of this rank
        other = 1 - rank
        read = source[mine & (source // own != rank)].unique()
        sent = source[~mine & (source // own == rank)].unique() - first
        counts = [[0, 0], [0, 0]]
        counts[0][other], counts[1][other] = len(sent), len(read)
        exchange = sent, counts
        where = torch.empty(vertices, dtype=torch.int64)
        where[first : first + own] = torch.arange(own)
        where[read] = own + torch.arange(len(read))
        source, target = where[source[mine]], target[mine] - first
    x = torch.randn(own, features)
    if kind in ("Edges", "Gat"):
        return model, (x, source, target), exchange
    starts = torch.arange(own + 1) * degree
    values = torch.full((len(source),), 1.0 / degree)
    columns = own + (len(read) if ranks > 1 else 0)
    return model, (x, torch.sparse_csr_tensor(starts, source, values, (own, columns))), exchange


def run(order: dict[str, Any]) -> None:
    """Time steps of all cases in turn on this rank; rank 0 writes them."""
    ranks = order["ranks"]
    rank = join_process_group("cpu")[0] if ranks > 1 else 0
    keep_freed_memory()
    torch.set_num_threads(2 // ranks)
    if ranks > 1:  # some schedulers leave both on one core
        os.sched_setaffinity(0, {rank})
    steps = {name: step_of(name, rank, ranks) for name in CASES}
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for turn in range(WARMUP + ROUNDS):
        for name, step in steps.items():
            if ranks > 1:
                dist.barrier()
            start_ns = time.perf_counter_ns()
            step()
            if turn >= WARMUP:
                times[name].append((time.perf_counter_ns() - start_ns) / 1e3)
    if ranks > 1:
        times = {name: max_over_ranks(some) for name, some in times.items()}
    if rank == 0:
        found = {name: statistics.median(some) for name, some in times.items()}
        Path(order["out"]).write_text(json.dumps(found))


def step_of(name: str, rank: int, ranks: int) -> Any:
    """A training step of this rank."""
    model, (x, *graph), exchange = made(name, rank, ranks)
    if exchange is not None:
        model.whole = lambda x: Exchange.apply(x, *exchange)
    trained = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters())
    labels = torch.zeros(len(x), dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(x, *graph), labels).backward()
        optimizer.step()

    return step


def captured(name: str) -> tuple[Any, str]:
    """The step of one process, and the plan of two."""
    model, inputs, _ = made(name)
    labels = torch.zeros(len(inputs[0]), dtype=torch.int64)
    step = capture(model, inputs, lambda out: nn.functional.cross_entropy(out, labels))
    source, target = (t.numpy() for t in edges(name))
    cut, halo = cut_of(source, target, len(labels), 2)
    return step, f"dp=2,cut={cut:.4g}:{halo:.4g}"


def points(path: Path) -> None:
    """Write the points of all ops of one process and of a rank of two."""
    found: dict[str, dict[Any, None]] = {name: {} for name in families()}
    for name in CASES:
        step, plan = captured(name)
        for one in (step, cut_graph(step, ParallelPlan.parse(plan))):
            for call in one.calls:
                family, params = find_family(call)
                if family is not None and params is not None:
                    found[family.name][params] = None
    write_points(path, {name: list(some) for name, some in found.items()})


def measure(path: Path) -> None:
    """Measure all cases in one and in two processes; write times by number of processes."""
    here = (str(Path(__file__).parent), str(Path(__file__).parents[2]))
    os.environ |= {"PYTHONPATH": os.pathsep.join(here), "OMP_PROC_BIND": "true"}
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in (1, 2):
            out = Path(scratch) / f"{ranks}.json"
            if start_ranks("graph_ranks", {"ranks": ranks, "out": str(out)}, ranks).wait():
                raise RuntimeError(f"{ranks} ranks failed")
            found.append(json.loads(out.read_text()))
    path.write_text(json.dumps(found))


def main(bundle: Path, measured: Path) -> None:
    """Print forecast and measured times of each case."""
    errors = []
    for name in CASES:
        step, plan = captured(name)
        for times, text in zip(json.loads(measured.read_text()), ("", plan), strict=True):
            us = predict(step, gpu="cpu", plan=text, bundle=bundle).iteration_us
            errors.append(math.log(us / times[name]))
            told = f"{times[name] / 1e3:8.2f} ms, forecast {us / 1e3:8.2f}"
            print(
                f"{name:10} {text or 'one process':26} {told} {100 * math.expm1(errors[-1]):+.1f} %"
            )
    for what, some in (("one process", errors[::2]), ("two", errors[1::2]), ("all", errors)):
        geomean = math.expm1(statistics.mean(abs(e) for e in some))
        bias = math.expm1(statistics.mean(some))
        print(f"{what}: geomean {100 * geomean:.1f} %, bias {100 * bias:+.1f} %")


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        run(json.loads(sys.argv[1]))
    elif sys.argv[1] in ("points", "measure"):
        {"points": points, "measure": measure}[sys.argv[1]](Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
