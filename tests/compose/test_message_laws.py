"""Laws of messages and states: bytes that ranks send and hold, counted by hand."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from law_case import (
    CUT,
    KIB,
    SPREAD,
    WIDTH,
    Bare,
    forecast_for,
    model,
    node_of,
    outcome,
    rank_for,
    run_of,
    tied_gpt,
)
from plan_case import CPU, GPU, Flat

from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.graph.launch_modes import with_engine
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing.collectives import Message, formula_us, price_messages
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.simulate.memory.stage_memory import memory
from itercast.compose.simulate.rank import AMONG_GROUPS, Rank, Run
from itercast.compose.simulate.rank_program import RankProgram
from itercast.compose.simulate.replicas import micro_batches
from itercast.compose.simulate.stage_rank import stage_messages
from itercast.compose.simulate.stages import stages_of
from itercast.learners.bundle import SHIPPED, SHIPPED_CPU, Bundle
from itercast.microbench.hardware.node import Node, load_node, node_names
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops.step.alpha_beta import CPU_STEP_US, LINK_SHARE


def sent(rank: Rank) -> dict[str, int]:
    """Bytes by kind of all messages that replicas without a pipeline send in a step."""
    seen, micro = Counter[str](), rank.plan.microbatches
    for i in range(micro):
        program, last = RankProgram(rank), i == micro - 1
        program.forward(last=last)
        program.backward(later=i > 0, sync=last or rank.strategy.scatters_each)
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
    """Four layers with a frozen product of 16,640 bytes and 2,048 trained ones; root 51,600.

    FSDP2 pads the 4 rows of half an adapter to 8, one for each rank, and the root's 100 to 104.
    """
    assert (BLOCK, ADAPTER, ROOT) == (16_640, 2_048, 51_600)
    found = {z: sent(rank_for("frozen", f"dp=8,zero={z},accumulate={micro}")) for z in range(4)}
    assert found[0] == {"all_reduce": 4 * 2_048}
    adapter, root = 2_048 + 1_024, 104 * ROOT // 100
    assert found[1] == {"all_gather": 4 * adapter, "reduce_scatter": 4 * adapter}
    once = root + 4 * (16_640 + adapter)
    assert found[2] == {"all_gather": micro * once, "reduce_scatter": micro * 4 * adapter}
    twice = once + 4 * (16_640 + adapter)
    assert found[3] == {"all_gather": micro * twice, "reduce_scatter": micro * 4 * adapter}


@pytest.mark.parametrize("zero", [2, 3])
def test_a_pipeline_scatters_gradients_once(zero: int) -> None:
    """Four micro-batches: as torch's pipelines run FSDP2, gradients are whole up to the last one.

    Without stages each micro-batch scatters. Parameters of zero=3 are gathered in each.
    """
    alone = rank_for("gpt", f"dp=4,zero={zero},accumulate=4")
    stage = rank_for("gpt", f"dp=4,zero={zero},pp=2,micro=4")
    assert sent(alone)["reduce_scatter"] == 4 * sent(stage)["reduce_scatter"]
    assert zero == 2 or sent(stage)["all_gather"] == sent(alone)["all_gather"]
    whole = rank_for("gpt", "dp=4,zero=1,pp=2,micro=4")
    assert memory(stage, "adamw")["gradients"] == memory(whole, "adamw")["gradients"]


@pytest.mark.parametrize("zero", [2, 3])
def test_without_sync_gradients_are_scattered_once(zero: int) -> None:
    """Of four micro-batches; gradients are whole as under zero=1, parameters gathered in each."""
    each, once, whole = (
        rank_for("gpt", f"dp=4,accumulate=4,{text}")
        for text in (f"zero={zero}", f"zero={zero},no_sync", "zero=1")
    )
    assert sent(each)["reduce_scatter"] == 4 * sent(once)["reduce_scatter"]
    assert sent(each)["all_gather"] == sent(once)["all_gather"]
    assert memory(once, "adamw")["gradients"] == memory(whole, "adamw")["gradients"]


@pytest.mark.parametrize("plan", ["dp=8", "dp=8,zero=1", "dp=8,zero=3", "dp=8,hsdp=4,zero=2"])
def test_mixed_precision_gathers_in_half_and_reduces_in_fp32(plan: str) -> None:
    """As FSDP2 with param_dtype bf16 and reduce_dtype fp32, and DDP under autocast.

    Shards, their gradients and states take what they do in fp32: 16 bytes a parameter, with the
    layers' results in bf16 but for the loss of logits. DeepSpeed and compress=0.5 reduce in bf16.
    """
    precise, half = (capture("gpt-s", batch=4, seq=64, dtype=d) for d in ("fp32", "bf16"))
    autocast = ParallelPlan.parse(f"{plan},amp").autocast
    mixed = capture("gpt-s", batch=4, seq=64, dtype="bf16", amp=autocast)
    wanted, found = sent(rank_for(precise, plan)), sent(rank_for(mixed, f"{plan},amp"))
    if "zero" not in plan:
        assert found == wanted
        return
    wanted["all_gather"] //= 2
    assert found == wanted
    rank, bare = rank_for(mixed, f"{plan},amp"), rank_for(half, plan)
    deepspeed = replace(rank, book=PriceBook(Flat(), GPU, 0, stack="deepspeed-0.10"))
    assert (
        sent(deepspeed)
        == sent(rank_for(mixed, f"{plan},amp,compress=0.5"))
        == sent(bare)
        == {kind: n // 2 for kind, n in sent(rank_for(precise, plan)).items()}
    )
    kept = ("parameters", "optimizer") + ("gradients",) * ("zero=1" not in plan)
    bytes_ = [memory(x, "adamw") for x in (rank_for(precise, plan), rank)]
    assert sum(bytes_[1][k] for k in kept) == sum(bytes_[0][k] for k in kept)
    wider = (4 - 2) * 4 * 64 * 512  # logarithms of probabilities of 4 x 64 tokens
    activations = memory(bare, "adamw")["activations"] + wider
    assert bytes_[1]["activations"] == pytest.approx(activations, rel=0.02)


def under(stack: str, model: Any, plan: str) -> Rank:
    """The rank of a plan, on this software."""
    return replace(rank_for(model, plan), book=PriceBook(Flat(), GPU, 0, stack=stack))


@pytest.mark.parametrize("stack", ["megatron-core", "deepspeed-0.10"])
@pytest.mark.parametrize("groups", ["", ",hsdp=4"])
def test_zero_1_of_software_that_reduces_late_sends_all_at_once(stack: str, groups: str) -> None:
    """As many bytes, in one gather before forward and one scatter after backward, beside nothing.

    NeMo, and torch's FSDP2, send 4 of each, one of a layer. Sums among groups are late, too.
    """
    plan = f"dp=8,zero=1{groups}"
    late, early = (under(name, "frozen", plan) for name in (stack, "nemo"))
    assert sent(late) == sent(early)
    runs = [micro_batches(rank, "adamw")[1] for rank in (late, early)]
    count = 2 + bool(groups)
    assert [len(run.sent) for run in runs] == [count, 4 * count]
    assert alone(runs[0])


def alone(run: Run) -> bool:
    """Whether all messages of a run are beside no compute."""
    both = list(zip(run.spans, run.tasks, strict=True))
    messages = [span for span, t in both if not {"host", "compute"} & {*t.lanes}]
    compute = [span for span, t in both if "compute" in t.lanes]
    return all(x.end_us <= m.start_us or x.start_us >= m.end_us for m in messages for x in compute)


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize(
    ("stack", "kind"), [("deepspeed-0.12.3", "reduce_scatter"), ("deepspeed", "all_reduce")]
)
def test_deepspeed_gathers_once_a_step_and_sums_with_zero_2_in_each_micro_batch(
    stack: str, kind: str, micro: int
) -> None:
    """Four layers with 2,048 trained bytes, 3,072 padded: beside no compute, frozen ones not sent.

    FSDP2 gathers them, frozen ones too, in each micro-batch (as counted above).
    """
    adapter = 2_048 + 1_024
    for zero, sums in ((1, 1), (2, micro)):
        rank = under(stack, "frozen", f"dp=8,zero={zero},accumulate={micro}")
        assert sent(rank) == {"all_gather": 4 * adapter, kind: sums * 4 * adapter}
        for run in (
            micro_batches(rank, "adamw")[1],
            *(r for r, _ in micro_batches(rank, "adamw")[0]),
        ):
            assert len(run.sent) <= 2
            assert alone(run)


@pytest.mark.parametrize(
    ("stack", "times"), [("megatron-core", 2), ("nemo", 1), ("deepspeed-0.10", 1)]
)
@pytest.mark.parametrize("plan", ["dp=8", "dp=8,zero=1", "dp=8,zero=1,pp=2"])
def test_gradients_are_reduced_in_the_dtype_of_the_buffer_that_sums_them(
    stack: str, times: int, plan: str
) -> None:
    """Megatron's of bf16 weights in fp32, twice the bytes; weights travel as they are.

    Of fp16 weights in fp16; NeMo and DeepSpeed send bf16 gradients.
    """
    for dtype, wider in (("bf16", times), ("fp16", 1)):
        half = capture("gpt-s", batch=4, seq=64, dtype=dtype)
        bare, found = sent(under("torch", half, plan)), sent(under(stack, half, plan))
        assert found == {n: b * (1 if n == "all_gather" else wider) for n, b in bare.items()}


@pytest.mark.parametrize("micro", [1, 3])
def test_hybrid_shards_send_within_their_group_and_shares_among_groups(micro: int) -> None:
    """Two groups of four ranks: what zero=3 sends among four, and a quarter of 2,048 bytes each."""
    text = f"zero=3,accumulate={micro}"
    inner, found = (sent(rank_for("frozen", f"{p},{text}")) for p in ("dp=4", "dp=8,hsdp=4"))
    assert found == inner | {"all_reduce": micro * 4 * 512}
    cluster = rank_for("frozen", "dp=16,hsdp=8,tp=1,zero=3").cluster.groups
    assert (cluster["shard"].size, cluster["shard"].per_node) == (8, 8)
    assert (cluster["replicate"].size, cluster["replicate"].per_node) == (2, 1)
    assert sent(rank_for("frozen", f"dp=8,hsdp=8,{text}")) == sent(
        rank_for("frozen", f"dp=8,{text}")
    )


def test_shares_are_summed_among_nodes_on_a_lane_of_their_own() -> None:
    """Each sum waits for its layer's scatter, and holds up none of the others."""
    run = run_of(rank_for("frozen", "dp=16,hsdp=8,zero=3"))
    scatters, sums = (
        [i for i, task in enumerate(run.tasks) if task.name == kind]
        for kind in ("reduce_scatter", "all_reduce")
    )
    assert [run.tasks[i].after for i in sums] == [(i,) for i in scatters]
    assert {(run.tasks[i].lanes, run.tasks[i].nodes) for i in sums} == {((AMONG_GROUPS,), 2)}
    assert {(run.tasks[i].lanes, run.tasks[i].nodes) for i in scatters} == {(("comm",), 1)}


def test_megatron_has_one_stream_for_scatters_and_sums() -> None:
    rank = rank_for("frozen", "dp=16,hsdp=8,zero=3")
    run = run_of(replace(rank, book=PriceBook(Flat(), GPU, 0, stack="megatron-core")))
    sums = [task for task in run.tasks if task.name == "all_reduce"]
    assert [task.lanes for task in sums] == [("comm",)] * 4


def test_the_next_layer_is_gathered_before_gradients_are_scattered() -> None:
    """As FSDP2's prefetch in backward, behind which compute does not wait for a scatter.

    Of four layers; the root is gathered first, its weights are frozen.
    """
    run = run_of(rank_for("frozen", "dp=8,zero=3"))
    lanes = {
        lane: [(t.name, s) for t, s in zip(run.tasks, run.spans, strict=True) if t.lanes == (lane,)]
        for lane in ("comm", "compute")
    }
    backward = ["all_gather", *["all_gather", "reduce_scatter"] * 3, "reduce_scatter"]
    assert [name for name, _ in lanes["comm"]] == ["all_gather"] * (1 + 4) + backward
    computed = [span for name, span in lanes["compute"] if name.startswith("blocks")][4:]
    assert [a.end_us == b.start_us for a, b in itertools.pairwise(computed)] == [True] * 3


@pytest.mark.parametrize("every", [1, 2, 4])
def test_replicas_that_step_alone_send_parameters_every_so_many(every: int) -> None:
    """Four adapters of 2,048 bytes, a quarter of them in a group of four, once in so many steps.

    Nothing overlaps the average: 8 tensors are packed, 8 KiB sent, and 8 unpacked, 1 us each.
    """
    assert sent(rank_for("frozen", f"dp=8,local={every}")) == {"all_reduce": 4 * 2_048 // every}
    inner = sent(rank_for("frozen", "dp=4,zero=3,accumulate=2"))
    text = f"dp=8,hsdp=4,zero=3,accumulate=2,local={every}"
    assert sent(rank_for("frozen", text)) == inner | {"all_reduce": 4 * 512 // every}
    alone, found = outcome("frozen", ""), outcome("frozen", f"dp=8,local={every}")
    assert found.iteration_us - alone.iteration_us == pytest.approx((8 + 8 + 8) / every)
    assert found.exposed_comm_us == pytest.approx(8 / every)
    assert found.memory == alone.memory


def test_sampled_participants_are_of_all_nodes() -> None:
    """Three eighths of 16 replicas on two nodes are six, three of each; others train nothing."""
    whole, some = (f"dp=16,local=4{share}" for share in ("", ":0.375"))
    group = rank_for("frozen", some).cluster.groups["shard"]
    assert (group.size, group.per_node) == (6, 3)
    times = [forecast_for(model("frozen"), text) for text in (whole, some)]
    samples = [f.samples_per_s * f.iteration_us * 1e-6 for f in times]
    assert samples == pytest.approx([16 * 4, 6 * 4])
    assert times[1].mfu_frac * times[1].iteration_us == pytest.approx(
        times[0].mfu_frac * times[0].iteration_us * 6 / 16
    )
    assert rank_for("frozen", "dp=8,local=4:0.01").cluster.groups["shard"].size == 1


@pytest.mark.parametrize("every", [1, 4])
def test_an_outer_optimizer_follows_each_average(every: int) -> None:
    """Seven calls of 10 us over the adapters' 8 KiB: their difference to the kept ones, these
    copied back; three additions and a product of SGD with Nesterov's momentum; the copy.

    It sends the same, and keeps a copy of the adapters and a momentum of each: 16 KiB, a quarter
    of it in a group of four.
    """
    alone, found = (outcome("frozen", f"dp=8,local={every}{o}") for o in ("", ",outer"))
    assert found.iteration_us - alone.iteration_us == pytest.approx(7 * 10 / every)
    assert found.comm_us == alone.comm_us
    assert found.memory["optimizer"] - alone.memory["optimizer"] == 2 * 4 * 2_048
    text = f"dp=8,hsdp=4,zero=3,local={every}"
    alone, found = (outcome("frozen", f"{text}{o}") for o in ("", ",outer"))
    assert found.memory["optimizer"] - alone.memory["optimizer"] == 2 * 4 * 2_048 // 4


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


def boundary(text: str, gpu: Gpu = GPU, engine: str = "eager") -> dict[str, float]:
    """Bytes by kind of what crosses the first boundary between stages."""
    rank = rank_for(with_engine(model("gpt"), engine), text, gpu)
    return {op.op: op.duration_us * KIB for op in stage_messages(rank)[0]}


def test_tensor_parallel_ranks_send_their_share_and_gather_it() -> None:
    """Megatron-LM's scatter and gather; with sp each rank holds a share anyway.

    A kernel that computes on both sides of the boundary sends no more: stages are fused apart.
    """
    for engine in ("eager", "compile", "fused"):
        assert boundary("pp=2", engine=engine) == {"send_recv": ACTIVATION}
    assert boundary("pp=2,tp=2") == {"send_recv": ACTIVATION / 2, "all_gather": ACTIVATION}
    assert boundary("pp=2,tp=4") == {"send_recv": ACTIVATION / 4, "all_gather": ACTIVATION}
    assert boundary("pp=2,tp=2,sp") == {"send_recv": ACTIVATION / 2}


class Slow(Flat):
    """A product takes as long as 16 KiB over the links."""

    def us(self, family: str, rows: pd.DataFrame) -> Any:
        return 16.0 if family == "gemm" else super().us(family, rows)


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


@pytest.mark.parametrize(
    ("case", "plan", "key"),
    [
        ("moe", "dp=4,ep=2,accumulate=4", "ep_overlap"),
        ("moe", "dp=4,ep=2,zero=3,accumulate=4", "ep_overlap"),
        ("gpt", "tp=2,sp", "tp_overlap"),
        ("gpt", "tp=2,sp,pp=2,micro=4", "tp_overlap"),
    ],
)
def test_messages_that_compute_hides_count_as_sent(case: str, plan: str, key: str) -> None:
    """What is no longer exposed is sent beside compute: their sum stays."""
    plain, less = (outcome(case, text, pricer=Slow) for text in (plan, f"{plan},{key}"))
    assert less.exposed_comm_us < plain.exposed_comm_us
    assert less.comm_us == pytest.approx(plain.comm_us)


def test_messages_to_experts_run_beside_other_micro_batches() -> None:
    """Of four micro-batches three have another one's compute beside their messages.

    A layer's compute C is divided among its four messages: of each of t us max(0, t - 3/4 C/4) is
    left. One micro-batch has none beside it.
    """
    alone, one, four = (
        rank_for("moe", f"dp=4,ep=2{text}", pricer=Slow).layers
        for text in (",accumulate=4", ",ep_overlap", ",ep_overlap,accumulate=4")
    )
    for plain, same, less in zip(alone, one, four, strict=True):
        assert (plain.forward, plain.backward) == (same.forward, same.backward)
        both = [[*x.forward, *x.backward] for x in (plain, less)]
        sent, left = ([op.duration_us for op in x if op.phase == "comm"] for x in both)
        if not sent:
            continue
        beside_us = sum(op.duration_us for op in both[0] if op.phase != "comm") / len(sent)
        assert len(sent) == 4
        assert left == pytest.approx([max(0.0, us - 0.75 * beside_us) for us in sent])


@pytest.mark.parametrize(
    ("ranks", "per_node", "sent"),
    [
        (4, 2, 5 / 6),  # 2 (1 - C(2,2) / C(4,2)) = 5/3 nodes for 2 experts
        (4, 1, 1.0),  # 4 (1 - C(3,2) / C(4,2)) = 2: each expert has a node of its own
        (4, 4, 1.0),  # in a node
    ],
)
def test_a_token_goes_once_to_each_node_of_its_experts(
    ranks: int, per_node: int, sent: float
) -> None:
    """Two of four experts, 6,000 bytes in all."""
    facts = {"kind": "all_to_all", "axis": "ep", "message_bytes": 6000}
    links = {"world_size": ranks, "ranks_per_node": per_node}
    assert Message(**facts, routed=(4, 2)).among(**links).message_bytes == round(6000 * sent)
    assert Message(**facts).among(**links).message_bytes == 6000


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
    (expected,) = price_messages([message], rank.book, rank.cluster)
    assert [op.duration_us for op in program.run().sent] == [expected.duration_us]


def test_two_gpus_of_a_mesh_share_one_link_of_each() -> None:
    """Four GPUs with 450e9 bytes/s to three others: 150e9, 300e9 and 450e9."""
    node = load_node("kestrel-h100")
    rates = [node.link_rate(n) for n in (2, 3, 4)]
    assert rates == pytest.approx([150e9, 300e9, 450e9])
    cluster = [cluster_for(ParallelPlan(dp=n), load_gpu(node.gpu), node) for n in (2, 4)]
    found = [w.link_bytes_per_s(w.groups["dp"].per_node) for w in cluster]
    assert found == pytest.approx([150e9, 450e9])
    assert node_of().link_rate(2) == 100e9  # a switch gives any pair the whole rate


def test_ranks_share_the_network_of_their_node() -> None:
    """A p3.16xlarge has 25 Gb/s, 3.125e9 bytes/s, for those of its eight GPUs that have a rank.

    The sum of ResNet-50's 102 MB of gradients over two nodes of one rank each takes 102e6 / 3.125e9
    = 32.6 ms at that rate. A GPU of a DGX A100 reaches its eight cards of 25e9 over PCIe of 31.5e9.
    """
    p3, dgx = load_node("p3-16xlarge"), load_node("dgx-a100")

    def rate(node: Node, text: str) -> float:
        return cluster_for(ParallelPlan.parse(text), load_gpu(node.gpu), node).network_bytes_per_s

    spread = [f"dp={n},node=n,nodes=2" for n in (2, 4)]
    assert [rate(p3, text) for text in (*spread, "dp=16", "tp=8,dp=2")] == [
        3.125e9,
        3.125e9 / 2,
        3.125e9 / 8,
        3.125e9 / 8,
    ]
    assert [rate(dgx, t) for t in (spread[0], "dp=16")] == [31.5e9, 25e9]
    cluster = cluster_for(ParallelPlan.parse(spread[0]), load_gpu(p3.gpu), p3)
    sum_of = Message(kind="all_reduce", axis="shard", message_bytes=102_000_000)
    us = formula_us(sum_of, cluster.groups["shard"], cluster) * LINK_SHARE["network"]
    assert us == pytest.approx(32_640, rel=0.02)


def test_cpus_as_nodes_share_a_network_of_a_file() -> None:
    """Four ranks on two CPUs of two, which have 2e9 bytes/s between them: 2 of 1e9.

    An all_reduce of 1e9 bytes sends 2 * 3/4 of them in a ring that leaves a CPU once: 750 ms, and
    2 steps; by two groups of one rank each of either CPU 2 * 1e9 * 2 * 1/2 bytes: 1 s. All that
    each of two ranks sends of an all_to_all is 3/4 of its buffer: 750 ms.
    """
    node = Node(name="n", gpu="cpu", gpus_per_node=2, topology="pcie", network_bytes_per_s=1e9)
    book = PriceBook(Bare(), CPU, 1)

    def us(kind: str, text: str, nodes: int = 2) -> float:
        cluster = cluster_for(ParallelPlan.parse(f"{text},node=n,nodes={nodes}"), CPU, node)
        message = Message(kind=kind, axis="shard", message_bytes=10**9)
        return price_messages([message], book, cluster)[0].duration_us

    assert us("all_reduce", "dp=4") == pytest.approx(750_000 + 2 * CPU_STEP_US)
    assert us("all_reduce", "tp=2,dp=2") == pytest.approx(1_000_000 + 2 * CPU_STEP_US)
    assert us("all_to_all", "dp=4") == pytest.approx(750_000 + CPU_STEP_US)
    alone = price_messages(
        [Message(kind="all_reduce", axis="shard", message_bytes=10**9)],
        book,
        cluster_for(ParallelPlan.parse("dp=2"), CPU),
    )[0]
    assert us("all_reduce", "dp=2", nodes=1) == alone.duration_us
    with pytest.raises(ValueError, match="CPUs as nodes need nodes=N, no pp"):
        cluster_for(ParallelPlan.parse("pp=2,node=n,nodes=2"), CPU, node)
    with pytest.raises(ValueError, match="8 ranks do not fit 2 nodes of 2"):
        us("all_reduce", "dp=8")


def test_one_rank_of_a_ring_sends_to_the_next_node() -> None:
    """Cyclic data parallelism over two nodes of eight on one network of 3.125e9 bytes/s.

    ResNet-50's 102 MB in 32 slots of 1/16 each: 32 * 6.375 MB / 3.125e9 = 65.3 ms of messages; as
    one of eight that send at a time each would take eight times as long.
    """
    node = load_node("p3-16xlarge")
    cluster = cluster_for(ParallelPlan.parse("dp=16,cdp=1,node=n"), load_gpu(node.gpu), node)
    slot = Message(kind="exchange", axis="dp", message_bytes=102_000_000 // 16)
    us = formula_us(slot, cluster.groups["dp"], cluster) * LINK_SHARE["network"]
    assert 32 * us == pytest.approx(65_280, rel=0.03)
    stages = replace(slot, axis="inter_node")  # of a pipeline: all eight send
    far = formula_us(stages, cluster.groups["inter_node"], cluster)
    assert far == pytest.approx(8 * us / LINK_SHARE["network"], rel=0.05)


@pytest.mark.parametrize("name", node_names())
def test_ranks_that_are_not_there_slow_no_message(name: str) -> None:
    """One rank of a group on each of 16 nodes, beside 7, 3, 1 or no other ranks of a node."""
    node = load_node(name)
    gpu, book = load_gpu(node.gpu), PriceBook(Bare(), load_gpu(node.gpu), 1)
    beside = [tp for tp in (8, 4, 2, 1) if tp <= node.gpus_per_node]
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"):
        for nbytes in (2**10, 2**20, 2**28):
            message, times = Message(kind=kind, axis="shard", message_bytes=nbytes), list[float]()
            for tp in beside:
                cluster = cluster_for(
                    ParallelPlan.parse(f"tp={tp},dp=16,node=n,nodes=16"), gpu, node
                )
                times.append(price_messages([message], book, cluster)[0].duration_us)
            assert times == sorted(times, reverse=True)


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
    for factor in (1, 4):
        node, gpu = node_of(gpus_per_node=2), GPU
        if of_what == "node":
            changed: dict[str, Any] = {rate: factor * getattr(node, rate)}
            node = replace(node, **changed)
        else:
            changed = {rate: factor * getattr(gpu, rate), "name": f"toy-{factor}"}
            gpu = replace(gpu, **changed)
        times.append(outcome("gpt", text, gpu, Bare, node).iteration_us)
    assert times[0] >= times[1]


def shipped_times(nodes: Iterable[Node], plan: str, sizes: Sequence[int]) -> list[list[float]]:
    """By the shipped models, us of four collectives of each size on each of these nodes."""
    kinds, times = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"), list[list[float]]()
    messages = [Message(kind=k, axis="dp", message_bytes=n) for k in kinds for n in sizes]
    for node in nodes:
        gpu = load_gpu(node.gpu)
        book = PriceBook(Bundle.load(SHIPPED), gpu, 0)
        cluster = cluster_for(ParallelPlan.parse(f"{plan},node=n"), gpu, node)
        times.append([op.duration_us for op in price_messages(messages, book, cluster)])
    return times


def test_a_slower_network_than_any_measured_is_no_faster() -> None:
    """By the shipped models, 16 H100 in two nodes, of which each sends half of what they add up.

    The slowest cluster with rows is one of 25e9 bytes/s for 16 ranks. Priced by a node's ranks and
    formulas below that, 25 MiB of an all_reduce took 4.0 ms over 1e9 bytes/s a GPU, 4.3 over 2e9.
    """
    node, rates = load_node("dgx-h100"), (0.2, 1, 2, 6, 25)
    slow = [replace(node, network_bytes_per_s=rate * 1e9) for rate in rates]
    times = shipped_times(slow, "dp=16", (25 * 2**20, 2**30))
    for slower, faster in itertools.pairwise(times):
        assert all(a > b for a, b in zip(slower, faster, strict=True))
    assert times[1][0] > 25 * 2**20 / (8 * 1e9) * 1e6  # a tree sends all of it over eight NICs


def test_no_message_jumps_at_the_slowest_link_with_rows() -> None:
    """By the shipped models, 16 H100 in two nodes over networks 5 % apart.

    Models know links from 25e9 bytes/s on: of an all_reduce of 16 ranks a network of 25e9 / 15 a
    GPU, of a gather 25e9 / 8. Below, messages were priced without the mean of an unseen cluster's
    errors, and took 23 % less.
    """
    node = load_node("dgx-h100")
    slow = [replace(node, network_bytes_per_s=1e9 * 1.05**n) for n in range(30)]
    for slower, faster in itertools.pairwise(shipped_times(slow, "dp=16", (2**30,))):
        assert all(0.97 < a / b / 1.05 < 1.03 for a, b in zip(slower, faster, strict=True))


def test_links_of_gpus_carry_both_ways_at_once_and_memory_of_a_cpu_in_turns() -> None:
    """An exchange takes as long as one way by the shipped models of an H100, longer by a CPU's.

    On a CPU by formula twice as long, but for the latency.
    """
    kinds, sizes = ("send_recv", "exchange"), (2**12, 2**22, 2**26)
    messages = [[Message(kind=k, axis="dp", message_bytes=n) for n in sizes] for k in kinds]
    for text in ("dp=8,node=n", "dp=16,node=n"):
        gpu, node = load_gpu("h100-sxm-80gb"), load_node("dgx-h100")
        cluster = cluster_for(ParallelPlan.parse(text), gpu, node)
        for bundle in (Bundle.load(SHIPPED), Bare()):
            one_way, both = (
                price_messages(m, PriceBook(bundle, gpu, 0), cluster) for m in messages
            )
            assert [op.duration_us for op in both] == [op.duration_us for op in one_way]
            assert {op.op for op in both} == {"exchange"}
    learned = Bundle.load(SHIPPED_CPU)
    cpu = next(iter(learned.gpus.values()))
    cluster = cluster_for(ParallelPlan.parse("dp=2"), cpu, None)
    for bundle, least, most in ((learned, 1.4, 2.8), (Bare(), 1.8, 2)):
        one_way, both = (price_messages(m, PriceBook(bundle, cpu, 1), cluster) for m in messages)
        for a, b in zip(one_way[1:], both[1:], strict=True):
            assert least < b.duration_us / a.duration_us <= most


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100", "dgx-b200"])
def test_links_faster_than_a_gpus_own_make_no_message_slower(name: str) -> None:
    """By the shipped models, which have rows over the GPU's own links alone.

    Far from these rows they tended to the formula, some took longer over links twice as fast.
    """
    node, factors = load_node(name), (1, 1.25, 1.5, 2, 4)
    fast = [replace(node, link_bytes_per_s=n * node.link_bytes_per_s) for n in factors]
    for slower, faster in itertools.pairwise(shipped_times(fast, "dp=8", (2**16, 2**22, 2**28))):
        assert all(a >= b for a, b in zip(slower, faster, strict=True)), (slower, faster)


def totals(name: str, text: str) -> tuple[int, int]:
    """Bytes of parameters and of gradients over the ranks of one model-parallel replica."""
    rank = rank_for(name, text)
    stages = stages_of(rank) if rank.plan.pp > 1 else [rank]
    layers = [x.layer for stage in stages for x in stage.layers]
    return sum(x.parameter_bytes for x in layers), sum(x.trained_bytes for x in layers)


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

    Parameters: once from zero=1, their first dimension padded to a multiple of the ranks, but for
    frozen ones under zero=1, which every rank keeps.
    """
    dp = 8
    parameters, trained = totals(name, "")
    rows = [(p, p.shape[0]) for p in model(name).parameters]
    padded = {p.name: p.nbytes // n * dp * -(-n // dp) for p, n in rows}
    cut = sum(padded[p.name] for p, _ in rows if p.ready_after >= 0)
    found = memory(rank_for(name, f"dp={dp},zero={zero},accumulate=2"), "adamw")
    frozen = parameters - trained
    whole = sum(padded.values())
    held = {0: dp * parameters, 1: cut + dp * frozen, 2: whole, 3: whole}[zero]
    assert dp * found["parameters"] == pytest.approx(held, abs=dp)
    assert dp * found["optimizer"] == pytest.approx(2 * trained * (1 if zero else dp), abs=dp)
    assert dp * found["gradients"] == pytest.approx(trained * (1 if zero > 1 else dp), abs=dp)


def test_a_short_gather_pays_for_every_rank_and_a_short_sum_for_each_doubling() -> None:
    """64 KiB from 256 to 1,024 ranks: a ring takes a step for each rank, a tree for each doubling.

    So parameters that the optimizer shards over 1,000 ranks are gathered at a cost of their own.
    """
    book = PriceBook(Bare(), GPU, 0)

    def us(kind: str, ranks: int) -> float:
        one = Message(kind=kind, axis="world", message_bytes=2**16, dtype="fp16")
        (op,) = price_messages([one], book, cluster_for(ParallelPlan(dp=ranks), GPU, None))
        return op.duration_us

    for kind, least, most in (("all_gather", 3.5, 4.0), ("all_reduce", 1.0, 1.25)):
        assert least < us(kind, 1024) / us(kind, 256) < most, kind
