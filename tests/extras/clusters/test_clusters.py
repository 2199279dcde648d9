"""Steps on unlike GPUs: files, splits and simulations counted by hand, laws on real prices."""

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from itercast.compose.forecast import Forecast
from itercast.compose.parallel.placement import Crossing
from itercast.compose.predict import predict
from itercast.compose.simulate.stages import _cost_cuts
from itercast.compose.simulate.timeline import Span, Task, side_by_side
from itercast.extras.clusters.file import read_cluster, subsets
from itercast.extras.clusters.search import job_on, plans_on_cluster, predict_on_cluster
from itercast.extras.clusters.split import _least_maximum
from itercast.microbench.ops.step.collective import Collective

TWO = "groups: {a: {gpu: h100-sxm-80gb, count: 1}, b: {gpu: h100-sxm-80gb, count: 1}}\n"
ALIKE = TWO + "links: [{between: [a, b], bytes_per_s: 1e18}]\n"
UNLIKE = ALIKE.replace("b: {gpu: h100", "b: {gpu: a100")


def on(tmp_path: Path, text: str, plan: str, case: str = "gpt-s", batch: int = 8) -> Forecast:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return predict_on_cluster(case, path, plan, batch=batch, dtype="bf16")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TWO.replace("count: 1}, b", "count: 0}, b"), "group 'a': count is at least 1, got 0"),
        (TWO.replace("b: {gpu: h100", "b: {gpu: h101"), "group 'b': unknown gpu 'h101-sxm-80gb'"),
        (TWO, "no link joins 'a' and 'b'"),
        (TWO + "links: [{between: [a, a], bytes_per_s: 1e9}]", "are those of its node"),
        (TWO + "links: [{between: [a, c], bytes_per_s: 1e9}]", "between lists two of"),
        (TWO + "links: [{between: [a, b], bytes_per_s: 0}]", "bytes_per_s is above 0"),
        (ALIKE[:-2] + ", {between: [b, a], bytes_per_s: 2e9}]", "disagree: 1e+18 and 2e+09 bytes"),
        (ALIKE.replace("count: 1}, b", "count: 1, rows: 17}, b"), "make no 1 micro-batches of 16"),
        (ALIKE.replace("count: 1}, b", "count: 2}, b"), "has 2 ranks, "),
        (ALIKE.replace("b: {gpu: h100-sxm-80gb", "b: {gpu: cpu"), "GPUs and CPUs"),
        ("groups: [h100]", "groups maps names to a gpu and a count"),
        ("gpus: 8", "unknown keys ['gpus']"),
        ("dp=2,cdp=1", "cdp needs equal GPUs; allowed on a cluster: dp, tp, sp"),
        ("tp=2", "a replica has 2 GPUs of one kind; group 'a' has 1"),
    ],
)
def test_wrong_files_and_plans_are_one_line(tmp_path: Path, text: str, told: str) -> None:
    asked = (text, "dp=2") if ":" in text else (ALIKE, text)
    with pytest.raises(ValueError) as failed:
        on(tmp_path, *asked)
    assert told in str(failed.value)
    assert "\n" not in str(failed.value)


def rank(*durations_us: float) -> list[Task]:
    """Compute, a message, and the optimizer after it."""
    first, sent, update = durations_us
    return [
        Task(("compute",), first),
        Task(("comm",), sent, (0,), once=1),
        Task(("compute",), update, (1,)),
    ]


def test_a_message_waits_for_the_slowest_rank() -> None:
    #  0 compute |==4==|          |1|
    #  1 compute |===6===|        |=2=|
    #  both comm         |==3==|
    fast, slow = side_by_side([rank(4, 3, 1), rank(6, 2, 2)], [1.0, 1.0])
    assert fast == (Span(0, 4), Span(6, 9), Span(9, 10))
    assert slow == (Span(0, 6), Span(6, 9), Span(9, 11))


def test_ranks_of_one_cpu_slow_each_other_while_both_compute() -> None:
    """At half speed 4 us take 8, when the other has 2 of 6 left; then 1 us of 2 beside 1 of 2."""
    fast, slow = side_by_side([rank(4, 3, 1), rank(6, 2, 2)], [1.0, 1.0], 2.0)
    assert fast == (Span(0, 8), Span(10, 13), Span(13, 15))
    assert slow == (Span(0, 10), Span(10, 13), Span(13, 16))


def test_rows_are_dealt_so_that_the_slowest_is_fastest() -> None:
    once, twice = 1.0 * np.arange(13), 2.0 * np.arange(13)
    assert _least_maximum([once, twice], [1, 1], 12, [0, 0]) == (8, 4)  # 8 us each
    # two replicas of 5 rows take 5 us, one of 2 takes 4; of (4, 4) the slower takes 8
    assert _least_maximum([once, twice], [2, 1], 12, [0, 0]) == (5, 2)
    assert _least_maximum([once, twice], [1, 1], 12, [0, 6]) == (6, 6)
    assert _least_maximum([once, twice], [2, 2], 11, [0, 0]) is None


def test_layers_are_cut_so_that_the_slowest_stage_is_fastest() -> None:
    assert _cost_cuts([[1.0] * 6, [2.0] * 6]) == [4, 6]  # 4 us each
    assert _cost_cuts([[9.0, 1, 1, 1], [1.0] * 4, [1.0] * 4]) == [1, 3, 4]


def test_messages_cross_the_link_between_groups() -> None:
    """An all_reduce of 1000 bytes among two sends 1000: 1 ms at 1 MB/s, and 50 us each way."""
    facts = {"kinds": ("all_reduce", "send_recv"), "axes": ("shard",), "latency_us": 50.0}
    link = Crossing(**facts, bytes_per_s=1e6, sharers=1)
    shared = Crossing(**facts, bytes_per_s=1e6, sharers=2)
    total = Collective(op="all_reduce", message_bytes=1000, world_size=2, ranks_per_node=1)
    assert link.crossed_us(total, "shard", 10.0) == 1100
    assert shared.crossed_us(total, "shard", 10.0) == 2100
    one = replace(total, op="send_recv")
    assert link.crossed_us(one, "shard", 10.0) == 1050
    assert link.crossed_us(total, "tp", 10.0) == 10.0


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,zero=3",
        "dp=2,accumulate=4",
        "pp=2,schedule=zb",
        "dp=2,gossip=exp2",
        "dp=2,local=4:0.5",
    ],
)
def test_groups_of_equal_gpus_are_forecast_as_without_groups(tmp_path: Path, plan: str) -> None:
    found, whole = (
        on(tmp_path, ALIKE, plan),
        predict("gpt-s", gpu="h100-sxm-80gb", plan=plan, batch=8, dtype="bf16"),
    )
    assert found.cluster["even_us"] == pytest.approx(whole.iteration_us)
    assert found.iteration_us <= whole.iteration_us * (1 + 1e-9)
    assert found.samples_per_s * found.iteration_us == pytest.approx(
        whole.samples_per_s * whole.iteration_us
    )


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,micro=4"])
def test_the_faster_gpu_gets_more(tmp_path: Path, plan: str) -> None:
    """The H100 has more samples or layers than the A100, and the step gains by it."""
    found = on(tmp_path, UNLIKE, plan, "gpt2-small", 16)
    fast, slow = found.cluster["groups"]
    first, second = (
        (fast["rows"], slow["rows"])
        if plan == "dp=2"
        else (int(fast["layers"]), int(slow["layers"]))
    )
    assert first > second
    assert first + second == (32 if plan == "dp=2" else 12)
    assert found.iteration_us < found.cluster["even_us"]
    assert found.idle_us == pytest.approx(sum(found.idle_by_us.values()), abs=1)


def test_plans_may_leave_groups_out(tmp_path: Path) -> None:
    """Over a link of 1 MB/s one GPU alone is faster than both."""
    path = tmp_path / "cluster.yaml"
    path.write_text(UNLIKE.replace("1e18", "1e6"))
    assert [f.gpus for f in subsets(read_cluster(path))] == [2, 1, 1]
    best, legal = plans_on_cluster(job_on("gpt-s", path, global_batch=4, dtype="bf16"), count=2)
    assert legal > 2
    assert best[0].gpu == "1 x h100-sxm-80gb"


SLOW_LINK = UNLIKE.replace("1e18", "1e7")


def test_unlike_devices_that_step_alone_average_every_so_many(tmp_path: Path) -> None:
    """A step has 1 / K of the average of parameters over the slow link: base + C / K.

    C is what 2 (n - 1) / n of the bytes of two ranks take: those of parameters at 1e7 bytes/s.
    """
    times = {k: on(tmp_path, SLOW_LINK, f"dp=2,local={k}").iteration_us for k in (1, 2, 4)}
    halves, quarters = times[1] - times[2], times[2] - times[4]
    assert halves == pytest.approx(2 * quarters, rel=0.02)
    found = on(tmp_path, SLOW_LINK, "dp=2,local=1")
    nbytes = found.memory_by_bytes["parameters"]
    assert 2 * halves == pytest.approx(nbytes / 1e7 * 1e6, rel=0.1)
    every = on(tmp_path, SLOW_LINK, "dp=2").iteration_us
    assert times[4] < times[2] < every


def test_gossip_in_a_ring_crosses_the_slow_link(tmp_path: Path) -> None:
    """Parameters go to both neighbours, which are one here, beside forward and backward."""
    fast, slow = (on(tmp_path, text, "dp=2,gossip=ring") for text in (UNLIKE, SLOW_LINK))
    nbytes = fast.memory_by_bytes["parameters"]
    assert slow.comm_us == pytest.approx(2 * nbytes / 1e7 * 1e6, rel=0.15)
    assert slow.iteration_us > fast.iteration_us


def of_groups(rate: str, **counts: int) -> str:
    """A cluster of these numbers of GPUs, by name, with eight samples each and equal links."""
    listed = [f"{g}: {{gpu: {g}-sxm-80gb, count: {n}, rows: 8}}" for g, n in counts.items()]
    links = [f"{{between: [{a}, {b}], bytes_per_s: {rate}}}" for a, b in combinations(counts, 2)]
    return f"groups: {{{', '.join(listed)}}}\nlinks: [{', '.join(links)}]\n"


@pytest.mark.parametrize(
    ("counts", "plan", "sent"),
    [
        ((4, 4), "dp=8,gossip=exp2", (1 + 2 + 4) / 3),  # pairs over the link, 1, 2 and 4 ranks away
        ((1, 2), "dp=3,gossip=exp2", 1),  # b to a from 1 away, a to b or b to a from 2 away
        ((8, 8), "dp=16,gossip=exp2", 1),  # two nodes, of each rank an eighth
        ((8, 8), "dp=16,gossip=ring", 2),
        ((2, 2), "dp=4,local=1:0.5", 4 / 6),  # of six pairs four have one of each group
        ((2, 2), "dp=4,local=2:0.75", 4 / 3 / 2),  # all threes do: 2 (3 - 1) / 3, every second step
        ((2, 2), "dp=4,local=1:0.25", 0),
    ],
)
def test_a_mean_round_crosses_the_link(
    tmp_path: Path, counts: tuple[int, int], plan: str, sent: float
) -> None:
    """So many times the bytes of parameters at 1e7 bytes/s."""
    text = of_groups("1e7", h100=counts[0], a100=counts[1])
    found = on(tmp_path, text, plan)
    us = found.memory_by_bytes["parameters"] / 1e7 * 1e6
    assert found.comm_us / us == pytest.approx(sent, rel=0.02, abs=0.01)


def test_a_round_lasts_as_its_slowest_participant(tmp_path: Path) -> None:
    """Of six pairs of two H200, an H100 and an A100 one has no slower GPU than an H200.

    In two more none is slower than the H100, three have the A100. Half of all samples are trained.
    """

    def asked(**counts: int) -> Forecast:
        text = of_groups("1e18", **counts).replace("h200-sxm-80gb", "h200-sxm-141gb")
        share = ":0.5" if len(counts) > 1 else ""
        plan = f"dp={sum(counts.values())},local=1000000{share}"
        return on(tmp_path, text, plan, "gpt2-small")

    found = asked(h200=2, h100=1, a100=1)
    alone = [asked(**{name: 2}).iteration_us for name in ("h200", "h100", "a100")]
    assert alone == sorted(set(alone))
    mean_us = (1 * alone[0] + 2 * alone[1] + 3 * alone[2]) / 6
    assert found.iteration_us == pytest.approx(mean_us, rel=1e-4)
    assert found.samples_per_s * found.iteration_us == pytest.approx(16 * 1e6)


def test_participants_of_seven_groups_are_too_many_choices(tmp_path: Path) -> None:
    text = re.sub(r"gpu: g\d", "gpu: h100", of_groups("1e18", **{f"g{n}": 1 for n in range(7)}))
    with pytest.raises(ValueError, match=r"are sampled of 6 groups at most; .* has 7"):
        on(tmp_path, text, "dp=7,local=2:0.5")
