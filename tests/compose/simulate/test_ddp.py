"""Gradient buckets and their overlap with backward, by hand."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from plan_case import Fixed, tensor

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import forecast
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.simulate.data_parallel import fill_buckets
from itercast.compose.simulate.replicas import EMPTY_BYTES, micro_batches
from itercast.compose.simulate.timeline import Span, Task, simulate
from itercast.extras.trace.forecasts import shown_rank
from itercast.microbench.hardware.node import load_node
from itercast.microbench.hardware.spec import Gpu, load_gpu

CPU = Gpu(name="toy", kind="cpu", sm_count=2, peak_flops_per_s={"fp32": 1e12}, l2_bytes=1e9)
GPU = Gpu(name="toy-gpu", peak_flops_per_s={"fp32": 1e12}, l2_bytes=1e9, link_bytes_per_s=1e11)
MIB = 2**20
PRICES_US = {"gemm": 10.0, "collective": 6.0, "elementwise": 1.0, "host": 2.0}
EMPTY_US = 0.0
MEDIAN = math.exp(-((math.log(1.2 / 0.8) / 2.563) ** 2) / 2)  # of a mean of 1 between these bounds


class Known(Fixed):
    """A product takes 10 us, an all-reduce 6, a copy 1, a host event 2; bounds are 20 % off.

    An empty message takes no time.
    """

    models: Mapping[str, Any] = dict.fromkeys(PRICES_US)

    def price(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> pd.DataFrame:
        us = pd.Series(PRICES_US[family], index=rows.index)
        if family == "collective":
            us[rows["message_bytes"] <= EMPTY_BYTES] = EMPTY_US
        bounds = {"predicted_us_p10": us * 0.8, "predicted_us_p90": us * 1.2}
        columns = {"predicted_us": us * MEDIAN, **bounds}
        return pd.DataFrame({**columns, "in_envelope": True})


def weight(name: str, mib: float, ready_after: int, dtype: str = "fp32") -> ParamSpec:
    shape = (int(mib * MIB) // (2 if dtype == "bf16" else 4),)
    return ParamSpec(name=name, shape=shape, dtype=dtype, storage=100, ready_after=ready_after)


def product(phase: str) -> OpCall:
    a = tensor(0, 10, 10)
    return OpCall(op="aten.mm.default", args=(a, a), outputs=(a,), phase=phase)


def step(host: Mapping[str, int] | None = None) -> StepCapture:
    """Forward, two backward calls that each ready a bucket, optimizer."""
    return StepCapture(
        calls=tuple(product(p) for p in ("forward", "backward", "backward", "optimizer")),
        parameters=(weight("first", 1, 2), weight("last", 1, 1)),
        host=host or {},
        samples=4,
    )


def test_buckets_close_with_the_gradient_that_fills_them() -> None:
    """The first at 1 MiB, the next at 25; what stays open closes last."""
    ready = [("e", 0.5), ("d", 2), ("c", 0.5), ("b", 20), ("a", 20), ("z", 1)]
    found = fill_buckets(("fp32", int(mib * MIB), name) for name, mib in ready)
    # 0.5 + 2 passes 1 MiB; then 0.5 + 20 is under 25 MiB, + 20 passes it
    assert found == [("fp32", ["e", "d"]), ("fp32", ["c", "b", "a"]), ("fp32", ["z"])]


def test_all_buckets_have_a_stated_size() -> None:
    """Of 2 MiB: 0.5 + 2 pass it, the next 0.5 + 20 too."""
    ready = [("e", 0.5), ("d", 2), ("c", 0.5), ("b", 20), ("a", 1)]
    found = fill_buckets((("fp32", int(mib * MIB), name) for name, mib in ready), 2 * MIB)
    assert [names for _, names in found] == [["e", "d"], ["c", "b"], ["a"]]


def test_a_bucket_holds_one_dtype() -> None:
    ready = [("a", "fp32"), ("b", "bf16"), ("c", "fp32")]
    found = fill_buckets((dtype, MIB // 2, name) for name, dtype in ready)
    assert found == [("fp32", ["a", "c"]), ("bf16", ["b"])]


def tasks_of(
    step: StepCapture, gpu: Gpu = CPU, stack: str = "torch", plan: str = "dp=2"
) -> tuple[list[Task], list[Span]]:
    """Every op of a step under DDP on two ranks of a CPU, or of a GPU."""
    step, book = replace(step, optimizer="adamw"), PriceBook(Known(), gpu, 1, stack=stack)
    rank = shown_rank(step, ParallelPlan.parse(plan), book)
    run = micro_batches(rank, step.optimizer)[1]
    return list(run.tasks), list(run.spans)


def test_reduces_overlap_backward_and_the_optimizer_waits() -> None:
    #  compute |=10=|=10=|1|=10=|1|   |1|     |1|=10=|    mul into the bucket, copy back
    #  comm                |==6==|    |==6==|             ready at 21 and 32
    tasks, _ = tasks_of(step())
    spans = simulate(tasks)  # nothing contended
    by_lane = [(t.lanes[0], s) for t, s in zip(tasks, spans, strict=True)]
    assert [s for lane, s in by_lane if lane == "comm"] == [Span(21, 27), Span(32, 38)]
    compute = [s for lane, s in by_lane if lane == "compute"]
    assert compute[-3:] == [Span(32, 33), Span(38, 39), Span(39, 49)]


@pytest.mark.parametrize(("stack", "share"), [("megatron-core", 1), ("nvidia-bert", 0.5)])
def test_software_that_reduces_late_sends_one_message_after_backward(
    stack: str, share: float
) -> None:
    """Of all gradients, which torch's DDP sends in two; of apex, under amp, in half precision."""
    early, _ = tasks_of(step(), GPU)
    tasks, spans = tasks_of(step(), GPU, stack, "dp=2,amp")
    (sent,) = [i for i, task in enumerate(tasks) if task.lanes == ("comm",)]
    backward = [i for i, task in enumerate(tasks[:sent]) if task.lanes == ("compute",)]
    assert tasks[sent].after == (backward[-1],)
    assert spans[sent].start_us == spans[backward[-1]].end_us
    both = [task.nbytes for task in early if task.lanes == ("comm",)]
    assert len(both) == 2
    assert tasks[sent].nbytes == share * sum(both)


def test_on_a_cpu_overlap_is_paid_for() -> None:
    #  compute |=10=|=10=|1|====16====|1|=2=| |1|=10=|   21..33 at half speed: compute does 6 of 10
    #  comm                |==12==|     |==7==|          second bucket ready at 38, the copy costs 1
    adamw = replace(step(), optimizer="adamw")
    found = forecast(adamw, ParallelPlan(dp=2), PriceBook(Known(), CPU, 1))
    assert found.iteration_us == pytest.approx(38 + 7 + 1 + 10)
    assert found.compute_us == pytest.approx(21 + 16 + 1 + 2 + 1 + 10)
    assert found.comm_us == pytest.approx(12 + 7)
    assert found.exposed_comm_us == pytest.approx(5)
    assert found.idle_us == pytest.approx(0)
    assert found.samples_per_s == pytest.approx(2 * 4 / 56e-6)
    assert found.by_family_us == pytest.approx(
        {"gemm": 40, "collective": 12, "elementwise": 4, "host": 0}
    )


def test_on_a_cpu_compute_pays_for_the_latency_of_a_message_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 6 us an empty message takes 4, in which ranks wake threads.

    Beside a product all 6 take 12, as at half speed; beside the copy of 1 us the next takes 6 + 1.
    """
    monkeypatch.setitem(globals(), "EMPTY_US", 4.0)
    tasks, spans = tasks_of(step())
    sent = [s for t, s in zip(tasks, spans, strict=True) if t.lanes[0] == "comm"]
    assert sent == [Span(21, 33), Span(38, 45)]


def test_running_statistics_are_broadcast_before_forward() -> None:
    """Mean and variance together, and the counter of steps: a message for each dtype."""
    x, stat = tensor(0, 4, 8), tensor(0, 8)
    norm = OpCall(op="aten.native_batch_norm.default", args=(x, stat, stat, stat, stat, True))
    tasks, _ = tasks_of(StepCapture(calls=(norm,)))
    names = [t.name.removeprefix("aten.").partition(".")[0] for t in tasks]
    joined = ["cat", "broadcast", "copy_"]
    assert names == [*joined, "copy_", *joined, "native_batch_norm"]


def test_a_gpu_with_long_kernels_waits_for_no_launch_of_a_step_in_a_loop() -> None:
    """Of four products, each of which costs the host a launch; kernels take 10 us.

    The measured event is a mean over small ops, of 1.6 launches: one takes 2 / 1.6 = 1.25 us.
    """
    #  host    |1.25|1.25|1.25|1.25|  of the next step
    #  compute |==10==|==10==|==10==|==10==|
    sgd = replace(step(), optimizer="sgd")
    found = forecast(sgd, ParallelPlan(), PriceBook(Known(), GPU, 0))
    times_us = (found.iteration_us, found.idle_us, found.host_us)
    assert times_us == pytest.approx((40, 0, 5))
    assert found.mfu_frac == pytest.approx(3 * 2000 / 1e12 / 40e-6)  # forward and backward


def reduce_of(nbytes: int) -> Message:
    return Message(kind="all_reduce", axis="dp", message_bytes=nbytes)


def test_a_forecast_says_by_which_network() -> None:
    """The node's, or what is assumed; one rank sends nothing."""
    gpu, node = load_gpu("h100-sxm-80gb"), load_node("dgx-h100")
    plans = [(16, node), (16, None), (4, None), (1, node)]
    assert [cluster_for(ParallelPlan(dp=n), gpu, of).network for n, of in plans] == [
        "dgx-h100: a GPU has 450 GB/s nvlink among 8, 50 GB/s network beyond",
        "no node named: a GPU has 450 GB/s nvlink among 8, 25 GB/s network beyond"
        " (assumed: no node states it)",
        "no node named: a GPU has 450 GB/s nvlink among 4",
        "",
    ]


def test_links_are_those_of_the_node_or_else_what_is_usual() -> None:
    """A pair with a bridge, four with a gap on the way, two of whose node nothing is known."""
    gpu, node = load_gpu("a100-pcie-80gb"), load_node("a100-pairwise")
    asked = [(2, node), (4, node), (2, None)]
    found = [cluster_for(ParallelPlan(dp=n), gpu, kind) for n, kind in asked]
    links = [cluster.link(n) for cluster, (n, _) in zip(found, asked, strict=True)]
    assert links == ["pairwise", "bridged", "pcie"]
    rates = [cluster.link_bytes_per_s(n) for cluster, (n, _) in zip(found, asked, strict=True)]
    assert rates == [300e9, 31.5e9, 31.5e9]


def test_a_rack_of_72_is_one_node_where_none_is_named() -> None:
    found = [cluster_for(ParallelPlan(dp=64), load_gpu(name)) for name in ("gb200", "b200-sxm")]
    assert [cluster.groups["dp"].per_node for cluster in found] == [64, 8]


class Noting(Known):
    """Notes the links and rates of networks that its collectives are said to cross."""

    def price(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> pd.DataFrame:
        self.told = rows[["link", "network_bytes_per_s"]].to_numpy().tolist()
        return super().price(family, rows, gpus)


def test_a_model_of_collectives_gets_link_and_network() -> None:
    """Sixteen ranks of two nodes cross the network, as their numbers say.

    The same message in one node is asked, too: it crosses links alone. The node states 12.5e9
    bytes/s a GPU; two of sixteen ranks sit in one node.
    """
    noting, told, gpu = Noting(), list[Any](), load_gpu("a100-pcie-80gb")
    for n in (4, 16):
        book = PriceBook(noting, gpu, 0)
        price_messages([reduce_of(10**6)], book, cluster_for(ParallelPlan(dp=n), gpu))
        told += [link for link, _ in noting.told]
    assert told == ["pcie", "", "pcie"]
    node = replace(load_node("dgx-a100"), network_bytes_per_s=12.5e9)
    cluster = cluster_for(ParallelPlan(tp=4, dp=16), GPU, node)
    inner = Message(kind="all_reduce", axis="tp", message_bytes=10**6)
    price_messages([reduce_of(10**6), inner], PriceBook(noting, GPU, 0), cluster)
    assert [rate for _, rate in noting.told] == [12.5e9, 0.0, 0.0]
    assert cluster.slowest_bytes_per_s("dp") == 12.5e9


def test_placement_decides_what_crosses_the_network() -> None:
    """Eight GPUs a node, tp innermost: of dp's 16 ranks two share a node."""
    cluster = cluster_for(ParallelPlan(tp=4, dp=16, pp=2), GPU)
    sizes = {axis: (g.size, g.per_node) for axis, g in cluster.groups.items()}
    assert sizes["tp"] == (4, 4)
    assert sizes["dp"] == (16, 2)
    assert sizes["pp"] == (2, 1)
