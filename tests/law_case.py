"""Small models, their plans and machines, and the iterations that are simulated of them."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from plan_case import GPU, Flat, capture_at, experts_at
from torch import nn

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.forecast import Forecast, forecast, rank_of
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.simulate.breakdown import Outcome
from itercast.compose.simulate.iteration import evaluate
from itercast.compose.simulate.rank import Rank, Run
from itercast.compose.simulate.rank_program import RankProgram
from itercast.microbench.hardware.node import Node
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families

KIB = 1024
WIDTH = 64


def scalar(logits: torch.Tensor) -> torch.Tensor:
    """A loss that no other model's ops are part of."""
    loss: torch.Tensor = torch.logsumexp(logits, -1).sum()
    return loss


class Adapted(nn.Module):
    """A frozen product beside two small trained ones, as LoRA adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.up(self.down(x))
        return x.add(self.base(x)).add(added)


class Frozen(nn.Module):
    """Four adapted layers between a frozen table and a frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(4))
        self.head = nn.Linear(WIDTH, 100).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return scalar(self.head(x))


class Images(nn.Module):
    """Convolutions with batch norms, which broadcast their statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            for _ in range(4)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return scalar(self.head(x.mean((2, 3))))


@cache
def model(name: str, batch: int = 4, seq: int = 64) -> StepCapture:
    """One step of a small model."""
    if name == "images":
        return capture(Images(), torch.zeros(batch, 3, 16, 16), batch=batch)
    if name == "frozen":
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        return capture(Frozen(), tokens, batch=batch, seq=seq)
    found: StepCapture = (experts_at if name == "moe" else capture_at)(batch, seq)
    return found


class Bare(Flat):
    """No op has a model: each takes the time of its flops and bytes at the peak, and a little."""

    models: Mapping[str, Any] = {}


class Knowing(Flat):
    """Every family has a model."""

    models: Mapping[str, Any] = dict.fromkeys([*families(), "collective", "host"])


@cache
def book_for(pricer: Callable[[], Any], gpu: Gpu) -> PriceBook:
    """Prices shared by all tests that ask this pricer about this GPU."""
    return PriceBook(pricer(), gpu, 1)


def rank_for(
    name: str | StepCapture,
    text: str,
    gpu: Gpu = GPU,
    pricer: Callable[[], Any] = Flat,
    node: Node | None = None,
) -> Rank:
    """A rank with all layers of the model."""
    step = model(name) if isinstance(name, str) else name
    plan, book = ParallelPlan.parse(text), book_for(pricer, gpu)
    cluster = cluster_for(plan, gpu, node)
    return rank_of(step, plan, book, cluster)


def outcome(
    name: str | StepCapture,
    text: str,
    gpu: Gpu = GPU,
    pricer: Callable[[], Any] = Flat,
    node: Node | None = None,
) -> Outcome:
    """The iteration of a model under a plan."""
    return evaluate(rank_for(name, text, gpu, pricer, node), "adamw")


def forecast_for(
    step: StepCapture, text: str, gpu: Gpu = GPU, pricer: Callable[[], Any] = Flat
) -> Forecast:
    """What is forecast of a step under a plan."""
    return forecast(step, ParallelPlan.parse(text), book_for(pricer, gpu))


def run_of(rank: Rank) -> Run:
    """A rank's step of one micro-batch."""
    program = RankProgram(rank)
    program.forward()
    program.backward(later=False, sync=True)
    program.update("adamw")
    return program.run()


REPLICAS = ["", "dp=2,", "dp=8,zero=1,", "dp=8,zero=2,", "dp=8,zero=3,", "dp=4,gossip=ring,"]
REPLICAS += ["dp=4,hsdp=2,zero=3,"]
SCHEDULES = ["1f1b", "gpipe", "zb", "interleaved:2"]
PLANS = [
    f"{r}{form}={n}" for r in REPLICAS for form in ("accumulate", "pp=2,micro") for n in (1, 3)
]
PLANS += [f"pp=2,micro=4,schedule={s}" for s in SCHEDULES]
PLANS += ["recompute=full", "recompute=selective,accumulate=2", "offload=activations,accumulate=4"]
PLANS += [
    "dp=2,offload=activations,accumulate=4",
    "dp=2,offload=optimizer",
    "dp=4,cdp=2",
    "dp=4,cdp=1,zero=3",
    "pp=2,micro=4,cdp=1",
]
PLANS += ["dp=4,local=4,accumulate=2", "dp=2,local=2,pp=2,micro=4", "dp=4,local=4:0.5"]
PLANS += ["dp=2,coconet=split,reorder,fuse,overlap:4", "dp=2,compress=0.5,accumulate=2"]
CUT = ["tp=2", "tp=2,sp,dp=2,zero=1", "cp=2,dp=2", "tp=2,pp=2,micro=4", "tp=2,sp,pp=2,micro=4"]
CUT += ["tp=2,sp,tp_overlap,accumulate=2"]
NO_ATTENTION = ("frozen", "images")
CASES = [
    (m, p)
    for m in ("gpt", *NO_ATTENTION)
    for p in PLANS
    if m not in NO_ATTENTION or "selective" not in p
]
CASES += [("gpt", p) for p in CUT] + [("moe", "dp=4,ep=2"), ("moe", "dp=4,ep=4,accumulate=2")]


@cache
def tied_gpt(frozen: bool = False) -> StepCapture:
    """Two blocks between a table and a head that is the table."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, WIDTH)
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.head = nn.Linear(WIDTH, 100, bias=False)
            self.head.weight = self.table.weight.requires_grad_(not frozen)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.table(tokens)
            for block in self.blocks:
                x = block(x).relu()
            return scalar(self.head(x))

    return capture(Tied(), torch.zeros(4, 64, dtype=torch.int64), batch=4, seq=64)


def node_of(**changes: Any) -> Node:
    """Eight GPUs, with links of 100e9 bytes/s and a network of 10e9."""
    facts: dict[str, Any] = {"gpu": "toy-gpu", "gpus_per_node": 8, "topology": "nvswitch"}
    facts |= {"link_bytes_per_s": 100e9, "network_bytes_per_s": 10e9}
    return Node(name="toy", **(facts | changes))


SPREAD = ["dp=8", "dp=8,zero=3", "tp=4,dp=2", "pp=4,micro=4", "pp=2,tp=2,dp=2", "cp=2,pp=2,dp=2"]
