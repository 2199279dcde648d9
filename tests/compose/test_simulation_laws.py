"""Laws over time, for small models under many plans.

The lanes of a rank add up to its iteration; more work is never faster.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
from law_case import CASES, Bare, Knowing, model, outcome, rank_for
from plan_case import CPU, GPU

from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing.layer_prices import price_model
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import UNMODELLED
from itercast.compose.simulate.iteration import quick_us
from itercast.compose.simulate.stages import stages_of
from itercast.compose.target import find_target, forecast_step
from itercast.microbench.hardware.node import load_node
from itercast.microbench.hardware.spec import Gpu, load_gpu

ON_CPU = [(name, text, CPU) for name, text in CASES if name == "gpt"]


@pytest.mark.parametrize(("name", "text", "gpu"), [*((*case, GPU) for case in CASES), *ON_CPU])
def test_lanes_of_a_rank_add_up_to_its_iteration(name: str, text: str, gpu: Gpu) -> None:
    found = outcome(name, text, gpu)
    lanes_us = found.compute_us + found.exposed_comm_us + found.idle_us
    assert lanes_us == pytest.approx(found.iteration_us)
    idle_us = (found.host_gap_us, found.bubble_us, found.waiting_us)
    assert sum(idle_us) == pytest.approx(found.idle_us, abs=1e-6) and min(idle_us) >= 0
    assert 0 <= found.exposed_comm_us <= found.comm_us + 1e-6
    assert quick_us(rank_for(name, text, gpu), "adamw") == pytest.approx(found.iteration_us)
    assert ("host" in found.tally.us) == (gpu is CPU)  # where it is time of the compute lane


@pytest.mark.parametrize(("name", "text"), CASES)
def test_time_by_family_is_the_compute_of_the_rank(name: str, text: str) -> None:
    """On a GPU, where nothing slows compute: every op counts as often as it runs, no host work."""
    found = outcome(name, text, pricer=Knowing)
    messages = ["collective", *([UNMODELLED] if "offload" in text else [])]  # its copies
    ops_us = sum(us for family, us in found.tally.us.items() if family not in messages)
    assert found.compute_us == pytest.approx(ops_us, rel=1e-9)
    assert "cdp" not in text or found.tally.us["collective"] > 0


def test_a_gpu_waits_no_longer_than_its_host_works() -> None:
    """Hooks of FSDP and of checkpoints are host work too; none of it is time of kernels.

    Not counted are launches of ops that a plan adds (copies of FSDP, recomputed ops), here less
    than 7 % of the host's work.
    """
    step = capture("gpt-s")
    found = {
        text: forecast_step(step, find_target("h100-sxm-80gb", text))
        for text in ("", "dp=4,zero=2", "dp=4,zero=3", "recompute=full")
    }
    for text, one in found.items():
        assert "host" not in one.by_family_us
        uncounted_frac = 0.07 if text else 0.0
        assert 0 < one.idle_by_us["host"] <= (1 + uncounted_frac) * one.host_us
        assert (one.host_us > found[""].host_us) == bool(text)


def test_a_step_that_is_waited_for_begins_with_an_idle_gpu() -> None:
    """Back to back the longer of host and GPU sets the pace; one by one the GPU waits for the
    first launch as well, and never less.
    """
    target = find_target("h100-sxm-80gb")
    for batch, seq in ((1, 16), (64, 1024)):
        alone = capture("gpt-s", batch=batch, seq=seq)
        in_a_row = forecast_step(alone, target)
        waited = forecast_step(replace(alone, synchronised=True), target)
        assert in_a_row.iteration_us == pytest.approx(max(in_a_row.host_us, in_a_row.compute_us))
        assert in_a_row.iteration_us < waited.iteration_us
        assert waited.iteration_us < in_a_row.host_us + in_a_row.compute_us


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


@pytest.mark.parametrize("text", ["dp={}", "dp={},accumulate=2"])
@pytest.mark.parametrize("name", ["dgx-h100", "p3-16xlarge"])
def test_as_much_work_a_gpu_over_more_nodes_is_never_faster(text: str, name: str) -> None:
    """All replicas do the same, and their messages are hidden: these last longer over nodes.

    Before that cost compute as much, 16 H100 were 0.7 % faster than 8.
    """
    node, step = load_node(name), capture("bert-large", batch=64, dtype="fp16")
    gpu, us = load_gpu(node.gpu), list[float]()
    for ranks in (8, 16, 64, 256):
        us.append(outcome(step, text.format(ranks), gpu, Bare, node).iteration_us)
    assert all(more >= us[0] * (1 - 1e-9) for more in us)


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


@pytest.mark.parametrize(
    ("stack", "whole"),
    [
        ("torch-2.0.1", True),
        ("torch-2.1", False),
        *((name, True) for name in ("megatron-core", "deepspeed", "transformers-4.46")),
    ],
)
def test_reentrant_checkpoints_run_the_whole_layer_again(stack: str, whole: bool) -> None:
    """Backward runs all of a block's forward again; torch's own from 2.1 on what backward reads.

    Nothing reads the result of the last product.
    """
    book, pairs = PriceBook(Knowing(), GPU, 1, stack=stack), []
    for text in ("recompute=full", ""):
        plan = ParallelPlan.parse(text)
        pairs.append(price_model(model("gpt"), plan, book, cluster_for(plan, GPU)).layers[1:-1])
    assert pairs[0]
    for x, y in zip(*pairs, strict=True):
        again = [op.op for op in x.backward[1 : len(x.backward) - len(y.backward)]]
        forward = [op.op for op in x.forward]
        assert again == forward[: len(again)]
        assert (again == forward) == whole
        products = [sum("mm" in op for op in ops) for ops in (forward, again)]
        assert products[0] - products[1] == (0 if whole else 1)


def layers_by_stage(text: str) -> list[int]:
    """Numbered layers of each stage, of ten equal ones between a table and a head."""
    deep = replace(model("frozen"), repeats={"blocks": 6})
    return [sum(x.numbered for x in s.layers) for s in stages_of(rank_for(deep, text))]


def test_stages_have_the_layers_stated() -> None:
    assert layers_by_stage("pp=4") == [3, 3, 2, 2]
    assert layers_by_stage("pp=4,first=1") == [1, 3, 3, 3]
    assert layers_by_stage("pp=4,first=1,last=2") == [1, 4, 3, 2]
    assert layers_by_stage("pp=2,last=3") == [7, 3]
    assert layers_by_stage("pp=2,first=4,last=6") == [4, 6]
    assert layers_by_stage("pp=4,layers=1+2+3+4") == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="are 9 layers, the model has 10"):
        layers_by_stage("pp=2,layers=4+5")
    for text in ("pp=4,first=8,last=1", "pp=2,first=4,last=5"):
        with pytest.raises(ValueError, match="10 layers leave 1 for"):
            layers_by_stage(text)
    with pytest.raises(ValueError, match="count equal layers; there are none"):
        rank = rank_for("images", "pp=2,first=1")
        unequal = replace(rank.model, layers=tuple(x for x in rank.model.layers if not x.numbered))
        stages_of(replace(rank, model=unequal))
