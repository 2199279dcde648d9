"""Whole plans: identities between strategies, memory, and cost that does not grow with ranks."""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from law_case import CUT, KIB, Bare, forecast_for, rank_for, run_of
from law_case import PLANS as LAWS
from plan_case import CPU, GPU, Flat

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan, micro_batch
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing import host
from itercast.compose.pricing.collectives import Message, formula_us, price_messages
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.work import Step, fold
from itercast.compose.simulate.breakdown import Shares
from itercast.compose.simulate.data_parallel import LayerBucket, strategy_of
from itercast.compose.simulate.memory.stage_memory import memory
from itercast.compose.simulate.pipeline import FIRST, StageTimes
from itercast.compose.simulate.rank import Lanes
from itercast.compose.simulate.replicas import slots_of, staggered, steady_us
from itercast.compose.simulate.stage_rank import pipeline_of
from itercast.compose.simulate.stages import partition
from itercast.compose.simulate.timeline import simulate
from itercast.learners.bundle import Bundle
from itercast.microbench.hardware.node import load_node
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops.step.alpha_beta import START_US

PLANS = [*LAWS[1::2], "recompute=full", "dp=2,coconet=split,reorder,fuse,overlap:8", *CUT]


class Launches(Flat):
    """A host event takes 3 us."""

    def us(self, family: str, rows: pd.DataFrame) -> Any:
        return 3.0 if family == "host" else super().us(family, rows)


def wire_bytes(text: str, capture: StepCapture) -> float:
    """Bytes over each rank's link in a step, from what the lanes carry at 1 us per KiB."""
    rank = rank_for(capture, text, CPU)
    n = rank.plan.dp
    factor = {"all_reduce": 2 * (n - 1) / n, "exchange": 1.0}
    return sum(op.duration_us * KIB * factor.get(op.op, (n - 1) / n) for op in run_of(rank).sent)


@pytest.mark.parametrize("gpu", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("text", PLANS)
def test_all_is_assumed_without_models_and_nothing_with_all(
    text: str, gpu: Gpu, gpt: StepCapture
) -> None:
    """Models price all but offloaded copies, and the gradient of a slice that tp makes."""
    plan = ParallelPlan.parse(text)
    assert forecast_for(gpt, text, gpu, Bare).assumed_frac == pytest.approx(1)
    found = forecast_for(gpt, text, gpu)
    expected = {
        "rank.offload_frac": bool(plan.offload),
        "price_book.roofline_overhead_us": plan.tp > 1,
        "alpha_beta.network_bytes_per_s": gpu is GPU and plan.world_size > 8,  # two nodes
    }
    assert set(found.assumed_by_us) == {name for name, wanted in expected.items() if wanted}
    assert found.assumed_frac * found.iteration_us == pytest.approx(
        sum(found.assumed_by_us.values())
    )


@pytest.mark.parametrize("gpu", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("text", PLANS)
def test_folded_layers_take_as_long_as_their_ops_one_by_one(
    text: str, gpu: Gpu, gpt: StepCapture
) -> None:
    """A task for every op of a rank's last micro-batch, and one for many ops in a row."""
    counted = replace(gpt, host={"module_call": 100})
    folded = rank_for(counted, text, gpu, Launches)
    each = replace(folded, layers=tuple(replace(x, shown=True) for x in folded.layers))
    ends = [run_of(one) for one in (folded, each)]
    assert len(ends[1].tasks) > len(ends[0].tasks) + 90
    assert ends[1].end_us == pytest.approx(ends[0].end_us, rel=1e-3)
    assert ends[1].blocking_us == pytest.approx(ends[0].blocking_us)


def test_reduce_scatter_and_all_gather_are_an_all_reduce(gpt: StepCapture) -> None:
    cluster = cluster_for(ParallelPlan(dp=8), GPU)
    us = {
        kind: formula_us(
            Message(kind=kind, axis="dp", message_bytes=2**30), cluster.groups["dp"], cluster
        )
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    }
    twice_us = START_US["ring"]["simple"]  # one collective starts once, two start twice
    assert us["reduce_scatter"] + us["all_gather"] - twice_us == pytest.approx(us["all_reduce"])
    assert wire_bytes("dp=8,zero=1", gpt) == pytest.approx(wire_bytes("dp=8", gpt))
    assert wire_bytes("dp=8,coconet=split", gpt) == pytest.approx(wire_bytes("dp=8", gpt))


def test_a_cpu_waits_for_each_shard(gpt: StepCapture) -> None:
    """torch has no streams there: gathers and scatters of FSDP2 are exposed to the last byte."""
    found = forecast_for(gpt, "dp=2,zero=3", CPU)
    assert found.exposed_comm_us == pytest.approx(found.comm_us)
    assert forecast_for(gpt, "dp=2,zero=3", GPU).exposed_comm_us < found.exposed_comm_us


def test_ranks_beyond_the_cores_share_them(gpt: StepCapture) -> None:
    """Two cores: four replicas compute half as fast as two; in a pipeline of four some wait."""
    two, four = (forecast_for(gpt, f"dp={n}", CPU) for n in (2, 4))
    quiet = [x.compute_us - x.comm_us + x.exposed_comm_us for x in (two, four)]
    assert quiet[1] == pytest.approx(2 * quiet[0], rel=0.01)
    shared = [
        rank_for(gpt, t, CPU).ranks_per_core
        for t in ("dp=2", "dp=4", "pp=2,micro=2", "pp=4,micro=4")
    ]
    assert shared == [1, 2, 1, pytest.approx(9 / 7)]  # 1, 2, 3, 4, 3, 2, 1 stages busy


def test_two_pairs_that_share_two_cores_send_half_as_fast_as_one() -> None:
    """The same message among two ranks: where four share the cores, pairs take turns."""
    book = PriceBook(Bundle(models={}, gpus={}), CPU, 1)
    message = Message(kind="all_gather", axis="tp", message_bytes=2**20)
    one, both = (
        price_messages([message], book, cluster_for(ParallelPlan.parse(text), CPU))[0].duration_us
        for text in ("tp=2", "dp=2,tp=2")
    )
    assert both == pytest.approx(2 * one)


class Wrapped(Flat):
    """Python of a wrapper takes 1000 us, other host events nothing."""

    def us(self, family: str, rows: pd.DataFrame) -> Any:
        if family == "host":
            return 1000.0 * rows["op"].isin(host.WRAPPERS)
        return super().us(family, rows)


def test_wrappers_cost_the_host_by_layer(gpt: StepCapture) -> None:
    """FSDP: two blocks and the root in two parts; a checkpoint a block; DTensor: see below.

    Its 11 products, a table and the loss; and with it, as with FSDP, a slower optimizer.
    """

    def more_us(text: str) -> float:
        bare, wrapped = (forecast_for(gpt, text, CPU, pricer) for pricer in (Flat, Wrapped))
        return wrapped.iteration_us - bare.iteration_us

    assert more_us("dp=2") == pytest.approx(0)
    assert more_us("recompute=full") == pytest.approx(2 * 1000)
    assert more_us("dp=2,zero=3") == pytest.approx((4 + 1) * 1000)
    share = 11 / 12  # spread over all ops, the optimizer's among them
    assert more_us("tp=2") == pytest.approx((13 + 1) * 1000, rel=1 - share)


def test_a_host_that_is_ahead_delays_nothing_unless_it_takes_longer() -> None:
    """Two kernels of 5 us: launched in 2 us each they take 2 + 10; ahead 10, or 2 x 9."""

    def end_us(launch_us: float, *, ahead: bool) -> float:
        lanes = Lanes(on_cpu=False, ahead=ahead)
        lanes.work(fold([Step(5.0, launch_us)] * 2, on_cpu=False), "ops")
        return max(span.end_us for span in simulate(lanes.tasks))

    assert [end_us(2.0, ahead=ahead) for ahead in (False, True)] == [12.0, 10.0]
    assert [end_us(9.0, ahead=ahead) for ahead in (False, True)] == [23.0, 18.0]


def test_recomputation_of_ops_saves_attention_and_every_second_product(gpt: StepCapture) -> None:
    """Of a GPT's qkv, projection, c_fc and c_proj; the other products are made again."""
    blocks = [x for x in rank_for(gpt, "recompute=ops", CPU).layers if x.numbered]
    saved = {("aten.addmm.default", 0), ("aten.addmm.default", 2), ("itercast.sdpa", 0)}
    assert all(set(x.kept) == saved for x in blocks)


def test_events_send_a_share_of_gossip_and_compute_every_norm(gpt: StepCapture) -> None:
    """EventGraD: a quarter of the messages and copies in a mean step, the norms in all of them."""
    texts = ("dp=2,gossip=ring", "dp=2,gossip=ring:0.25")
    always, events = (run_of(rank_for(gpt, text)) for text in texts)
    for kind in ("sent", "copies"):
        a, b = (sum(op.duration_us for op in getattr(run, kind)) for run in (always, events))
        assert b == pytest.approx(a / 4)
    norms = [op.op for op in events.updates if op.op not in {x.op for x in always.updates}]
    assert norms == ["aten._foreach_norm.default"]


KINDS = ("reduce_scatter", "exchange", "all_gather")
COMPRESSIONS = ("dp=2", "dp=2,compress=0.75", "dp=2,compress=0.5")


def test_compression_and_gossip_send_less(gpt: StepCapture) -> None:
    gradients = sum(p.nbytes for p in gpt.parameters)
    assert wire_bytes("dp=8,compress=0.25", gpt) == pytest.approx(
        wire_bytes("dp=8", gpt) / 4, rel=1e-3
    )
    assert wire_bytes("dp=8,gossip=exp2", gpt) == pytest.approx(gradients)
    assert wire_bytes("dp=8,gossip=ring", gpt) == pytest.approx(2 * gradients)


def test_a_fused_all_reduce_copies_nothing_into_buckets(gpt: StepCapture) -> None:
    """As many bytes as DDP's, in one message a bucket, none after the update, 1/8 of the state."""
    texts = ("dp=8", "dp=8,coconet=split,reorder,fuse")
    ddp, fused = (run_of(rank_for(gpt, text)) for text in texts)
    sent = [[(op.op, op.duration_us) for op in run.sent] for run in (ddp, fused)]
    assert sent[0] == sent[1] and {kind for kind, _ in sent[1]} == {"all_reduce"}
    assert len(ddp.copies) == 2 * len(gpt.parameters) and not fused.copies
    assert max(s.end_us for s in fused.spans) < max(s.end_us for s in ddp.spans)
    memory = forecast_for(gpt, "dp=8,coconet=split,reorder,fuse").memory_by_bytes
    size = sum(p.nbytes for p in gpt.parameters)
    assert (memory["buckets"], memory["optimizer"]) == (0, 2 * size // 8)


@pytest.mark.parametrize(("text", "neighbours"), [("ring", 2), ("exp2", 1)])
def test_gossip_averages_within_nodes_first(text: str, neighbours: int, gpt: StepCapture) -> None:
    """16 replicas on two nodes, 1 us per KiB: each GPU sends an eighth over the network.

    Messages start before forward has ended; the optimizer waits for them, backward does not.
    """
    run = run_of(rank_for(gpt, f"dp=16,gossip={text}"))
    whole_us = sum(p.nbytes for p in gpt.parameters) / KIB
    spent = {kind: sum(op.duration_us for op in run.sent if op.op == kind) for kind in KINDS}
    assert spent["exchange"] == pytest.approx(neighbours * whole_us / 8, rel=1e-3)
    assert spent["reduce_scatter"] == spent["all_gather"] == pytest.approx(whole_us)
    spans = {
        name: [s for t, s in zip(run.tasks, run.spans, strict=True) if t.name == name]
        for name in ("reduce_scatter", "forward", "backward", "all_gather", "optimizer")
    }
    assert spans["reduce_scatter"][0].start_us < spans["forward"][0].end_us
    assert spans["backward"][0].start_us < spans["all_gather"][-1].end_us
    assert spans["optimizer"][0].start_us >= spans["all_gather"][-1].end_us


def test_half_of_a_fp32_gradient_goes_in_fp16() -> None:
    bucket = LayerBucket(instance=0, offset=0, nbytes=64, dtype="fp32", axis="shard", members=())
    sent = {
        p: bucket.message("all_reduce", strategy_of(ParallelPlan.parse(p))) for p in COMPRESSIONS
    }
    assert [m.message_bytes for m in sent.values()] == [64, 48, 32]
    assert [m.dtype for m in sent.values()] == ["fp32", "fp32", "fp16"]


def test_a_cyclic_slot_is_as_long_as_its_compute_or_its_messages() -> None:
    assert steady_us(80, 2, 8, 1.0) == 80  # 8 slots of 10 us, a message of 2 in each
    assert steady_us(80, 40, 8, 1.0) == 8 * 40
    assert steady_us(80, 2, 8, 2.0) == 8 * 12  # on a CPU the two add up
    assert steady_us(80, 2, 8, 2.0, asleep_us=1) == 8 * 11  # but for the ranks' sleep


def test_cyclic_messages_between_nodes_are_hidden(gpt: StepCapture) -> None:
    """16 ranks on two nodes: what they send in t costs a step of 10 t 10.4 % of t.

    92,832 bytes take 53.34 us, in one node 10.29: there, at 9.02e9 bytes/s, 0.6 * 9.02 / 10.02 of
    the time is lost to compute, which is 10.4 % of the 53.34.
    """
    node, text = load_node("p3-16xlarge"), "dp=16,cdp=1,node=p3-16xlarge"
    rank = rank_for(gpt, text, load_gpu(node.gpu), Bare, node)
    ((sent, times),) = slots_of(rank)
    assert times == 32
    sent_us = times * sent[0].duration_us
    alone_us = 10 * sent_us
    found = staggered(rank, Shares(alone_us, alone_us, 0.0, 0.0))
    lost_us = 0.6 * 9.018 / 10.018 * 10.294 * times
    assert lost_us == pytest.approx(0.104 * sent_us, rel=0.01)
    assert found.end_us == pytest.approx(alone_us + lost_us, abs=0.01 * lost_us)
    assert (found.exposed_us, found.comm_us) == (0, sent_us)


@pytest.mark.parametrize("ranks", [2, 4])
def test_staggered_replicas_hand_stages_on(ranks: int, gpt: StepCapture) -> None:
    """zero=3 with cdp: 2N messages of P/N bytes of parameters, N of gradients: 3P in all.

    Memory is that of parameters and sums of gradients of three of N stages, and 1/N of Adam's state
    of two copies; without zero P, 2P with the messages, and 2P.
    """
    rank, plain = (rank_for(gpt, f"dp={ranks},cdp=1{zero}") for zero in (",zero=3", ""))
    whole = sum(x.layer.trained_bytes for x in rank.layers)
    slots = slots_of(rank)
    assert [(len(sent), times) for sent, times in slots] == [(1, ranks), (2, ranks)]
    sent_bytes = sum(op.nbytes * times for sent, times in slots for op in sent)
    assert sent_bytes == pytest.approx(3 * whole, rel=1e-5)
    ((once, times),) = slots_of(plain)
    assert times * once[0].nbytes == pytest.approx(2 * whole, rel=1e-5)
    held, without = memory(rank, "adamw"), memory(plain, "adamw")
    stages = min(3, ranks) * whole / ranks
    assert held["parameters"] == pytest.approx(stages, rel=1e-5)
    assert held["gradients"] == pytest.approx(stages, rel=1e-5)
    assert held["optimizer"] == pytest.approx(2 * whole / ranks, rel=1e-5)
    assert held["buckets"] == 0
    assert without["parameters"] == without["buckets"] == whole
    assert held["activations"] <= without["activations"] + whole


def test_micro_batches_of_a_pipeline_that_never_drains_share_its_gpus(gpt: StepCapture) -> None:
    """cdp with pp: no bubble, the weights of two steps, N GPUs for N replicas of N stages.

    Stages of 1 + 2 us: a step of three micro-batches adds 9 us, where 1F1B takes 9 + 2 * 3 from an
    empty pipeline. With messages of 10 us two in flight take 2 * (1 + 2 + 10) there and back.
    """
    rank, drained = (rank_for(gpt, f"pp=3,micro=3{key}") for key in (",cdp=1", ""))
    found = pipeline_of([rank] * 3, "adamw")
    assert rank.plan.world_size == 3
    assert found.finish_us([StageTimes(forward_us=1, backward_us=2)] * 3) == (9, 9, 9)
    slow = StageTimes(forward_us=1, backward_us=2, send_us=10)
    two = pipeline_of([rank_for(gpt, "pp=2,cdp=1")] * 2, "adamw")
    assert two.finish_us([slow] * 2) == (26, 26)
    steps_us = [
        3 * t.forward_us + 2 * t.backward_us + t.of("A", FIRST) + tail.added_us
        for t, tail in zip(found.times, found.tails, strict=True)
    ]
    assert max(found.totals_us()) == pytest.approx(max(steps_us))
    held, other = memory(rank, "adamw"), memory(drained, "adamw")
    assert held == {**other, "parameters": 2 * other["parameters"]}


def test_embedding_and_head_are_layers_where_stages_need_them(gpt: StepCapture) -> None:
    """Two blocks on two, three and four stages, as Megatron-LM counts them."""
    layers = rank_for(gpt, "", CPU).model.layers
    cuts = [partition(layers, ParallelPlan(pp=n)) for n in (2, 3, 4)]
    found = [[[x.layer.name for x in chunk.layers] for chunk in cut] for cut in cuts]
    assert found[0] == [["first", "blocks.0"], ["blocks.0", "last"]]
    assert found[1] == [["first", "blocks.0"], ["blocks.0"], ["last"]]
    assert found[2] == [["first"], ["blocks.0"], ["blocks.0"], ["last"]]
    assert (
        forecast_for(gpt, "pp=4,micro=8").iteration_us
        > forecast_for(gpt, "pp=2,micro=8").compute_us / 2
    )


def test_bad_plans_of_a_model_name_the_rule(gpt: StepCapture) -> None:
    with pytest.raises(ValueError, match="5 stages, the model has 2 layers, 4 parts"):
        forecast_for(gpt, "pp=5")
    with pytest.raises(ValueError, match="6 samples do not divide by 4 micro-batches"):
        micro_batch(ParallelPlan(pp=4), 6, 64)
    with pytest.raises(ValueError, match="length of 66 does not divide by"):
        micro_batch(ParallelPlan(cp=2), 6, 66)


class Counted(Flat):
    """Counts the rows it is asked for."""

    def __init__(self) -> None:
        self.rows = 0

    def us(self, family: str, rows: pd.DataFrame) -> Any:
        self.rows += len(rows)
        return super().us(family, rows)


def test_cost_does_not_grow_with_replicas(gpt: StepCapture) -> None:
    """16 to 100,000 GPUs: as many tasks are simulated and as many rows priced."""
    deep = replace(gpt, repeats={"blocks": 94})

    def cost(dp: int) -> tuple[int, int]:
        pricer = Counted()
        run = run_of(rank_for(deep, f"tp=4,dp={dp},zero=1", pricer=lambda: pricer))
        return len(run.tasks), pricer.rows

    few, many = cost(4), cost(25_000)
    assert few[0] == many[0] and few[1] >= many[1]  # of so small shards some are equal
