"""Laws between ranks and over time, for small models under many plans.

What all ranks do together is what one process does, plus what a plan states to copy; the lanes of a
rank add up to its iteration; more work is never faster and a better machine never slower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pandas as pd
import pytest
import torch
from plan_case import CPU, GPU, Flat, capture_at, experts_at
from torch import nn

from compose.capture_model import capture
from compose.forecast import rank_of
from compose.parallel.plan import ParallelPlan
from compose.pricing.collectives import Message, cluster, price_messages
from compose.pricing.layer_prices import price_model
from compose.pricing.price_book import UNMODELLED, PriceBook, Pricer
from compose.simulate.iteration import Outcome, evaluate, quick_us
from compose.simulate.rank import Rank
from compose.simulate.rank_program import RankProgram
from compose.simulate.stage_rank import memory, stage_messages, stages_of
from microbench.hardware.node import Node, load_node
from microbench.hardware.spec import Gpu, load_gpu
from microbench.opcall import StepCapture
from microbench.ops import families

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
def book_for(pricer: Callable[[], Pricer], gpu: Gpu) -> PriceBook:
    """Prices shared by all tests that ask this pricer about this GPU."""
    return PriceBook(pricer(), gpu, 1)


def rank_for(
    name: str | StepCapture,
    text: str,
    gpu: Gpu = GPU,
    pricer: Callable[[], Pricer] = Flat,
    node: Node | None = None,
) -> Rank:
    """A rank with all layers of the model."""
    step = model(name) if isinstance(name, str) else name
    plan, book = ParallelPlan.parse(text), book_for(pricer, gpu)
    where = cluster(plan, gpu, node)
    return rank_of(plan, price_model(step, plan, book, where), book, where)


def outcome(
    name: str | StepCapture,
    text: str,
    gpu: Gpu = GPU,
    pricer: Callable[[], Pricer] = Flat,
    node: Node | None = None,
) -> Outcome:
    """The iteration of a model under a plan."""
    return evaluate(rank_for(name, text, gpu, pricer, node), "adamw")


REPLICAS = ["", "dp=2,", "dp=8,zero=1,", "dp=8,zero=2,", "dp=8,zero=3,", "dp=4,gossip=ring,"]
REPLICAS += ["dp=4,hsdp=2,zero=3,"]
SCHEDULES = ["1f1b", "gpipe", "zb", "interleaved:2"]
PLANS = [
    f"{r}{form}={n}" for r in REPLICAS for form in ("accumulate", "pp=2,micro") for n in (1, 3)
]
PLANS += [f"pp=2,micro=4,schedule={s}" for s in SCHEDULES]
PLANS += ["recompute=full", "recompute=selective,accumulate=2", "offload=activations,accumulate=4"]
PLANS += ["dp=2,offload=activations,accumulate=4", "dp=2,offload=optimizer", "dp=4,cdp=2"]
PLANS += ["dp=2,coconet=split,reorder,fuse,overlap:4", "dp=2,compress=0.5,accumulate=2"]
CUT = ["tp=2", "tp=2,sp,dp=2,zero=1", "cp=2,dp=2", "tp=2,pp=2,micro=4", "tp=2,sp,pp=2,micro=4"]
CUT += ["tp=2,sp,tp_overlap,accumulate=2"]
CASES = [(m, p) for m in ("gpt", "frozen", "images") for p in PLANS]
CASES += [("gpt", p) for p in CUT] + [("moe", "dp=4,ep=2"), ("moe", "dp=4,ep=4,accumulate=2")]


# --- lanes


@pytest.mark.parametrize("gpu", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize(("name", "text"), CASES)
def test_lanes_of_a_rank_add_up_to_its_iteration(name: str, text: str, gpu: Gpu) -> None:
    found = outcome(name, text, gpu)
    lanes_us = found.compute_us + found.exposed_comm_us + found.idle_us
    assert lanes_us == pytest.approx(found.iteration_us)
    idle_us = (found.host_gap_us, found.bubble_us, found.waiting_us)
    assert sum(idle_us) == pytest.approx(found.idle_us, abs=1e-6) and min(idle_us) >= 0
    assert 0 <= found.exposed_comm_us <= found.comm_us + 1e-6
    assert quick_us(rank_for(name, text, gpu), "adamw") == pytest.approx(found.iteration_us)


@pytest.mark.parametrize(("name", "text"), CASES)
def test_time_by_family_is_the_compute_of_the_rank(name: str, text: str) -> None:
    """On a GPU, where nothing slows compute: every op counts as often as it runs."""
    found = outcome(name, text, pricer=Knowing)
    messages = ["collective", "host", *([UNMODELLED] if "offload" in text else [])]  # its copies
    ops_us = sum(us for family, us in found.tally.us.items() if family not in messages)
    assert found.compute_us == pytest.approx(ops_us, rel=1e-9)


@pytest.mark.parametrize(
    ("replicas", "copies"),
    [
        *[("", 8), ("dp=2,", 8), ("dp=4,gossip=ring,", 8), ("dp=8,zero=1,", 8)],
        *[("dp=8,zero=2,", 8 + 16), ("dp=8,zero=3,", 8 + 2 * 16)],
    ],
)
def test_gradients_are_added_in_each_micro_batch_but_the_first(replicas: str, copies: int) -> None:
    """Four layers with two trained parameters of four each: 8 additions of 1 us.

    zero=2 and 3 copy 8 gradients to be scattered instead, and what they gather, 16 parameters.
    """
    us = [
        outcome("frozen", f"{replicas}accumulate={n}").tally.us["elementwise"] for n in (1, 2, 3, 4)
    ]
    layers = rank_for("frozen", "").layers
    ops = sum(op.family == "elementwise" for x in layers for op in (*x.forward, *x.backward))
    assert [b - a for a, b in pairwise(us)] == pytest.approx([ops + copies] * 3)


def test_stages_add_gradients_in_each_micro_batch_but_the_first() -> None:
    """The second of two stages has two layers: four additions."""
    us = [outcome("frozen", f"pp=2,micro={n}").tally.us["elementwise"] for n in (1, 2, 3, 4)]
    layers = stages_of(rank_for("frozen", "pp=2"))[1].layers
    ops = sum(op.family == "elementwise" for x in layers for op in (*x.forward, *x.backward))
    assert [b - a for a, b in pairwise(us)] == pytest.approx([ops + 4] * 3)


# --- parameters, gradients, states


def totals(name: str, text: str) -> tuple[int, int]:
    """Bytes of parameters and of gradients over the ranks of one model-parallel replica."""
    rank = rank_for(name, text)
    stages = stages_of(rank) if rank.plan.pp > 1 else [rank]
    layers = [x.layer for stage in stages for x in stage.layers]
    return sum(x.parameter_bytes for x in layers), sum(x.trained_bytes for x in layers)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["gpt", "frozen", "images"])
def test_stages_hold_each_parameter_once(name: str, schedule: str) -> None:
    """But for weights that the last stage ties to the first's, of which it has a copy."""
    whole = model(name)
    parameters = sum(p.nbytes for p in whole.parameters)
    trained = sum(p.nbytes for p in whole.parameters if p.ready_after >= 0)
    tied = sum(p.nbytes for p in rank_for(name, "").model.graph.tied)
    assert totals(name, "") == (parameters, trained)
    found = totals(name, f"pp=2,micro=2,schedule={schedule}")
    assert found == (parameters + tied, trained + tied)


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


def test_a_tied_table_is_on_both_ends_of_a_pipeline() -> None:
    """100 x 64 in fp32: 25,600 bytes more, in parameters, gradients and the optimizer's state."""
    ends = [sum(x.layer.parameter_bytes for x in s.layers) for s in stages_of(
        rank_for(tied_gpt(), "pp=2,micro=2")
    )]  # fmt: skip
    blocks = 2 * 4 * (WIDTH * WIDTH + WIDTH)
    assert ends == [25_600 + blocks, 25_600 + blocks]
    alone = memory(rank_for(tied_gpt(), "pp=2,micro=2"), "adamw")
    assert alone["gradients"] == 25_600 + blocks
    assert alone["optimizer"] == 2 * (25_600 + blocks)
    frozen = memory(rank_for(tied_gpt(frozen=True), "pp=2,micro=2"), "adamw")
    assert frozen["parameters"] == 25_600 + blocks
    assert frozen["optimizer"] == 2 * blocks


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["gpt", "frozen", "images"])
def test_replicas_hold_what_their_strategy_copies(name: str, zero: int) -> None:
    """Eight replicas, two micro-batches: states once from zero=1, gradients once from zero=2.

    Parameters: once from zero=1 but for frozen ones under zero=1, which every rank keeps.
    """
    dp = 8
    parameters, trained = totals(name, "")
    found = memory(rank_for(name, f"dp={dp},zero={zero},accumulate=2"), "adamw")
    frozen = parameters - trained
    held = {0: dp * parameters, 1: trained + dp * frozen, 2: parameters, 3: parameters}[zero]
    assert dp * found["parameters"] == pytest.approx(held, abs=dp)
    assert dp * found["optimizer"] == pytest.approx(2 * trained * (1 if zero else dp), abs=dp)
    assert dp * found["gradients"] == pytest.approx(trained * (1 if zero > 1 else dp), abs=dp)


# --- messages


def sent(rank: Rank) -> dict[str, int]:
    """Bytes by kind of all messages that replicas without a pipeline send in a step."""
    seen, micro = Counter[str](), rank.plan.microbatches
    for i in range(micro):
        program, last = RankProgram(rank), i == micro - 1
        program.forward(last=last)
        program.backward(later=i > 0, sync=last or rank.strategy.every_micro)
        if last:
            program.update("adamw")
        for op in program.run().sent:
            seen[op.op] += round(op.duration_us * KIB)
    return {kind: n for kind, n in seen.items() if n}


BLOCK = 4 * (WIDTH * WIDTH + WIDTH)  # frozen product and bias of an adapted layer
ADAPTER = 4 * 2 * 4 * WIDTH  # trained
ROOT = 4 * (100 * WIDTH + WIDTH * 100 + 100)  # frozen table and head


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_replicas_send_the_bytes_counted_by_hand(micro: int) -> None:
    """Four layers with a frozen product of 16,640 bytes and 2,048 trained ones; root 51,600."""
    assert (BLOCK, ADAPTER, ROOT) == (16_640, 2_048, 51_600)
    found = {z: sent(rank_for("frozen", f"dp=8,zero={z},accumulate={micro}")) for z in range(4)}
    assert found[0] == {"all_reduce": 4 * 2_048}
    assert found[1] == {"all_gather": 4 * 2_048, "reduce_scatter": 4 * 2_048}
    once = 51_600 + 4 * (16_640 + 2_048)
    assert found[2] == {"all_gather": micro * once, "reduce_scatter": micro * 4 * 2_048}
    twice = once + 4 * (16_640 + 2_048)
    assert found[3] == {"all_gather": micro * twice, "reduce_scatter": micro * 4 * 2_048}


@pytest.mark.parametrize("text", ["dp=8", "dp=8,offload=activations", "dp=8,zero=1"])
@pytest.mark.parametrize("name", ["gpt", "frozen", "images"])
def test_accumulation_sends_gradients_once(name: str, text: str) -> None:
    once = outcome(name, text).tally.us["collective"]
    assert outcome(name, f"{text},accumulate=4").tally.us["collective"] == pytest.approx(once)


@pytest.mark.parametrize("micro", [1, 3])
def test_hybrid_shards_send_within_their_group_and_shares_among_groups(micro: int) -> None:
    """Two groups of four ranks: what zero=3 sends among four, and a quarter of 2,048 bytes each."""
    text = f"zero=3,accumulate={micro}"
    inner, found = (sent(rank_for("frozen", f"{p},{text}")) for p in ("dp=4", "dp=8,hsdp=4"))
    assert found == inner | {"all_reduce": micro * 4 * 512}
    where = rank_for("frozen", "dp=16,hsdp=8,tp=1,zero=3").where.groups
    assert (where["shard"].size, where["shard"].per_node) == (8, 8)
    assert (where["replicate"].size, where["replicate"].per_node) == (2, 1)
    assert sent(rank_for("frozen", f"dp=8,hsdp=8,{text}")) == sent(
        rank_for("frozen", f"dp=8,{text}")
    )


def test_hybrid_shards_hold_what_their_group_shares() -> None:
    """Sixteen ranks in groups of four hold four times what one group of four does."""
    four, hybrid = (
        memory(rank_for("frozen", f"{text},zero=3,accumulate=2"), "adamw")
        for text in ("dp=4", "dp=16,hsdp=4")
    )
    assert hybrid == four
    rank = rank_for("frozen", "dp=16,hsdp=4,zero=2")
    assert memory(rank, "adamw")["optimizer"] == 2 * 4 * ADAPTER // 4


@pytest.mark.parametrize(("zero", "nbytes"), [(0, 0), (1, 2 * 2_048)])
def test_a_stage_gathers_what_it_shards_after_its_update(zero: int, nbytes: int) -> None:
    """Two of four adapted layers on each stage; frozen weights stay where they are."""
    (stage, _) = stages_of(rank_for("frozen", f"dp=4,pp=2,zero={zero}"))
    program = RankProgram(stage)
    program.update("adamw")
    assert [round(op.duration_us * KIB) for op in program.run().sent] == [nbytes] * bool(zero)


ACTIVATION = 4 * 64 * 96 * 4  # samples, tokens, width, bytes of fp32: gpt-s


def messages_us(text: str, node: Node | None = None) -> float:
    """Time of collectives of the slowest rank of a small GPT."""
    return outcome("gpt", text, node=node).tally.us.get("collective", 0.0)


def test_stages_send_each_micro_batch_forth_and_back() -> None:
    """One activation forth, its gradient back, at 1 us per KiB; the tied table is reduced once."""
    whole = rank_for("gpt", "")
    tied = sum(p.nbytes for p in whole.model.graph.tied) / KIB
    assert whole.layers[1].layer.output_bytes == ACTIVATION
    for micro in (1, 2, 4):
        assert messages_us(f"pp=2,micro={micro}") == pytest.approx(
            2 * micro * ACTIVATION / KIB + tied
        )


def boundary(text: str, gpu: Gpu = GPU) -> dict[str, float]:
    """Bytes by kind of what crosses the first boundary between stages."""
    rank = rank_for("gpt", text, gpu)
    return {op.op: op.duration_us * KIB for op in stage_messages(rank)[0]}


def test_tensor_parallel_ranks_send_their_share_and_gather_it() -> None:
    """Megatron-LM's scatter and gather; with sp each rank holds a share anyway."""
    assert boundary("pp=2") == {"send_recv": ACTIVATION}
    assert boundary("pp=2,tp=2") == {"send_recv": ACTIVATION / 2, "all_gather": ACTIVATION}
    assert boundary("pp=2,tp=4") == {"send_recv": ACTIVATION / 4, "all_gather": ACTIVATION}
    assert boundary("pp=2,tp=2,sp") == {"send_recv": ACTIVATION / 2}


def test_tensor_parallelism_reduces_four_activations_a_block() -> None:
    """Two blocks, an all_reduce after attention and one after the MLP, forth and back each.

    One more for the table, one for the head's input, and three of the loss, a number a token each.
    """
    ops = [op for x in rank_for("gpt", "tp=2").layers for op in (*x.forward, *x.backward)]
    sizes = Counter(round(op.duration_us * KIB) for op in ops if op.phase == "comm")
    assert sizes == {ACTIVATION: 2 * 4 + 2, 4 * 64 * 4: 3}


class Slow(Flat):
    """A product takes as long as 16 KiB over the links."""

    def price(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> pd.DataFrame:
        found: pd.DataFrame = super().price(family, rows)
        if family == "gemm":
            found[["predicted_us", "predicted_us_p10", "predicted_us_p90"]] = 16.0
        return found


def test_collectives_overlap_the_products_they_belong_to() -> None:
    """96 us for an activation; of a product of 16 us in two chunks 8 run beside its message.

    A block in forward: a gather before two products of attention (queries; keys and values) or one
    of the MLP, and a scatter behind the product that ends each.
    """
    plain, found = (
        [
            op.duration_us
            for x in rank_for("gpt", text, pricer=Slow).layers
            if x.numbered
            for op in x.forward
            if op.phase == "comm"
        ]
        for text in ("tp=2,sp", "tp=2,sp,tp_overlap")
    )
    assert plain == [96.0] * 4 * 2
    assert Counter(96.0 - us for us in found) == {16.0: 2, 8.0: 2 * 3}
    times = [outcome("gpt", t, pricer=Slow) for t in ("tp=2,sp", "tp=2,sp,tp_overlap")]
    assert times[0].compute_us == times[1].compute_us
    assert times[0].exposed_comm_us > times[1].exposed_comm_us


# --- where messages go


def node_of(**changes: Any) -> Node:
    """Eight GPUs, with links of 100e9 bytes/s and a network of 10e9."""
    facts: dict[str, Any] = {"gpu": "toy-gpu", "gpus_per_node": 8, "topology": "nvswitch"}
    facts |= {"link_bytes_per_s": 100e9, "network_bytes_per_s": 10e9}
    return Node(name="toy", **(facts | changes))


SPREAD = ["dp=8", "dp=8,zero=3", "tp=4,dp=2", "pp=4,micro=4", "pp=2,tp=2,dp=2", "cp=2,pp=2,dp=2"]
PLACED = [("gpt", text) for text in SPREAD] + [("tied", "pp=2,dp=4"), ("tied", "pp=4,dp=2,zero=1")]


@pytest.mark.parametrize(("name", "text"), PLACED)
def test_a_message_inside_a_node_costs_its_link(name: str, text: str) -> None:
    """Eight ranks in a node: its network may have any rate; over eight nodes it matters."""
    step = tied_gpt() if name == "tied" else model(name)
    inside, far = (
        [outcome(step, t, pricer=Bare, node=node_of(network_bytes_per_s=rate))
         for rate in (1e9, 10e9)]
        for t in (text, f"{text},node=dgx-h100,nodes=8")
    )  # fmt: skip
    assert inside[0].iteration_us == inside[1].iteration_us
    assert inside[0].comm_us == inside[1].comm_us
    assert far[0].comm_us > far[1].comm_us


@pytest.mark.parametrize("per_node", [4, 2, 1])
def test_tied_weights_are_reduced_where_first_and_last_stage_are(per_node: int) -> None:
    """25,600 bytes: over the link of a node of four stages, else over the network."""
    node = node_of(gpus_per_node=per_node)
    rank = rank_for(tied_gpt(), "pp=4,micro=4", pricer=Bare, node=node)
    program = RankProgram(rank)
    program.reduce_tied(25_600)
    axis = "intra_node" if per_node == 4 else "inter_node"
    message = Message(kind="all_reduce", axis=axis, message_bytes=25_600)
    (expected,) = price_messages([message], rank.book, rank.where)
    assert [op.duration_us for op in program.run().sent] == [expected.duration_us]


def test_two_gpus_of_a_mesh_share_one_link_of_each() -> None:
    """Four GPUs with 450e9 bytes/s to three others: 150e9, 300e9 and 450e9."""
    node = load_node("kestrel-h100")
    rates = [node.link_rate(n) for n in (2, 3, 4)]
    assert rates == pytest.approx([150e9, 300e9, 450e9])
    where = [cluster(ParallelPlan(dp=n), load_gpu(node.gpu), node) for n in (2, 4)]
    found = [w.link_bytes_per_s(w.groups["dp"].per_node) for w in where]
    assert found == pytest.approx([150e9, 450e9])
    assert node_of().link_rate(2) == 100e9  # a switch gives any pair the whole rate


BETTER = [
    ("link_bytes_per_s", "node"),
    ("network_bytes_per_s", "node"),
    ("hbm_bytes_per_s", "gpu"),
    ("pcie_bytes_per_s", "gpu"),
]


@pytest.mark.parametrize(("rate", "of_what"), BETTER)
@pytest.mark.parametrize("text", [*CUT, *SPREAD, "offload=activations", "dp=8,zero=1,accumulate=2"])
def test_more_bandwidth_is_never_slower(text: str, rate: str, of_what: str) -> None:
    times = []
    for factor in (1, 2, 8):
        node, gpu = node_of(gpus_per_node=2), GPU
        if of_what == "node":
            changed: dict[str, Any] = {rate: factor * getattr(node, rate)}
            node = replace(node, **changed)
        else:
            changed = {rate: factor * getattr(gpu, rate), "name": f"toy-{factor}"}
            gpu = replace(gpu, **changed)
        times.append(outcome("gpt", text, gpu, Bare, node).iteration_us)
    assert times[0] >= times[1] >= times[2]


# --- time


@pytest.mark.parametrize("micro", [1, 2, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb"])
def test_the_slowest_stage_decides(schedule: str, micro: int) -> None:
    """No step is shorter than any stage's micro-batches; a slower stage never helps."""
    text = f"pp=2,micro={micro},schedule={schedule}"
    rank = rank_for("gpt", text)
    loads = [
        sum(x.forward_work.lane_us + x.backward_work.lane_us for x in stage.layers)
        for stage in stages_of(rank)
    ]
    assert loads[0] != loads[1]
    found = evaluate(rank, "adamw")
    assert found.iteration_us >= micro * max(loads)
    assert found.compute_us >= micro * max(loads)


@pytest.mark.parametrize("form", ["accumulate={}", "dp=2,zero=2,accumulate={}", "pp=2,micro={}"])
def test_more_micro_batches_never_shrink_the_work(form: str) -> None:
    """Eight samples as 1, 2, 4 and 8 micro-batches: each has its own launches and bytes."""
    us = [outcome(model("gpt", 8 // n), form.format(n), pricer=Bare).compute_us for n in (1, 2, 4)]
    assert us == sorted(us)


@pytest.mark.parametrize("text", ["pp=1,micro=2", "dp=1,micro=2", "tp=1,cp=1,ep=1,micro=2"])
@pytest.mark.parametrize("name", ["gpt", "frozen", "images", "moe"])
def test_a_degree_of_one_changes_nothing(name: str, text: str) -> None:
    one, none = outcome(name, text), outcome(name, "accumulate=2")
    assert one == none


GROWING = ["", "dp=2", "dp=4,zero=3", "tp=2", "pp=2,micro=2", "recompute=full"]


@pytest.mark.parametrize("text", GROWING)
def test_more_samples_tokens_and_layers_are_never_faster(text: str) -> None:
    """Priced by flops and bytes, doubled in each way."""
    sizes = [(2, 32), (4, 32), (4, 64), (8, 64)]
    deep = [replace(model("gpt"), repeats={"blocks": n}) for n in (0, 2, 8)]
    for steps in ([model("gpt", *size) for size in sizes], deep):
        found = [outcome(step, text, pricer=Bare) for step in steps]
        for values in (
            [x.iteration_us for x in found],
            [x.compute_us for x in found],
            [x.memory_bytes for x in found],
        ):
            assert values == sorted(values)
        assert found[0].compute_us < found[1].compute_us < found[2].compute_us


def test_equal_layers_may_change_places() -> None:
    """Of stages of equal layers any order takes as long: the sum over stages is the same."""
    deep = replace(model("frozen"), repeats={"blocks": 4})
    for schedule in ("1f1b", "interleaved:2"):
        rank = rank_for(deep, f"pp=2,micro=4,schedule={schedule}")
        counted = Counter(x.layer.name for s in stages_of(rank) for x in s.layers)
        assert counted == Counter(x.layer.name for x in rank.layers)


# --- which layers


def test_a_share_of_the_layers_recomputes() -> None:
    """Every second of eight layers; three of them; all."""
    deep = replace(model("frozen"), repeats={"blocks": 4})
    none, half, most, all_ = (
        rank_for(deep, text) for text in ("", "recompute=full:0.5", "recompute=full:0.375",
                                          "recompute=full")
    )  # fmt: skip
    for found, expected in ((half, [1, 3, 5, 7]), (most, [2, 5, 7]), (all_, list(range(8)))):
        pairs = zip(found.layers[1:9], none.layers[1:9], strict=True)
        assert [
            i for i, (x, y) in enumerate(pairs) if len(x.backward) > len(y.backward)
        ] == expected
    us = [outcome(deep, p).compute_us for p in ("", "recompute=full:0.5", "recompute=full")]
    assert us[1] - us[0] == pytest.approx(us[2] - us[1])
    wide = replace(model("gpt"), repeats={"blocks": 6})
    held = [
        sum(x.saved_bytes for x in rank_for(wide, p).layers)
        for p in ("", "recompute=full:0.5", "recompute=full")
    ]
    assert held[0] - held[1] == held[1] - held[2] > 0
    assert outcome(deep, "recompute=full:1").compute_us == us[2]


def layers_by_stage(text: str) -> list[int]:
    """Numbered layers of each stage, of ten equal ones between a table and a head."""
    deep = replace(model("frozen"), repeats={"blocks": 6})
    return [sum(x.numbered for x in s.layers) for s in stages_of(rank_for(deep, text))]


def test_first_and_last_stage_have_the_layers_stated() -> None:
    assert layers_by_stage("pp=4") == [3, 3, 2, 2]
    assert layers_by_stage("pp=4,first=1") == [1, 3, 3, 3]
    assert layers_by_stage("pp=4,first=1,last=2") == [1, 4, 3, 2]
    assert layers_by_stage("pp=2,last=3") == [7, 3]
    assert layers_by_stage("pp=2,first=4,last=6") == [4, 6]
    for text in ("pp=4,first=8,last=1", "pp=2,first=4,last=5"):
        with pytest.raises(ValueError, match="10 layers leave 1 for"):
            layers_by_stage(text)
    with pytest.raises(ValueError, match="count equal layers; there are none"):
        rank = rank_for("images", "pp=2,first=1")
        unequal = replace(rank.model, layers=tuple(x for x in rank.model.layers if not x.numbered))
        stages_of(replace(rank, model=unequal))
