"""Laws of what lies in host memory: copies take PCIe's time, and never less than their bytes."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from drawn_plans import drawn, is_legal
from law_case import Bare, outcome, rank_for
from plan_case import CPU, GPU, Flat

from itercast.capture.opcall import ParamSpec
from itercast.capture.plan import ParallelPlan
from itercast.compose.graph.layers import Layer
from itercast.compose.pricing.host import host_bytes_per_s
from itercast.compose.simulate.fsdp import shard_bytes
from itercast.compose.simulate.rank import OFFLOAD_FRAC
from itercast.compose.simulate.rank_program import RankProgram
from itercast.compose.simulate.replicas import micro_batches
from itercast.compose.simulate.stages import stages_of
from itercast.microbench.hardware.node import load_node

SLOW = replace(GPU, name="slow-pcie", pcie_bytes_per_s=1e8)
RATE = SLOW.pcie_bytes_per_s * OFFLOAD_FRAC["pcie"]


@pytest.mark.parametrize("text", ["", "dp=4,zero=1", "dp=4,zero=2", "dp=4,zero=3", "dp=4"])
def test_what_layers_save_goes_to_the_host_and_back(text: str) -> None:
    """Every layer's bytes, once each way, in each of two micro-batches, whatever ZeRO shards."""
    rank = rank_for("gpt", f"{text},accumulate=2,offload=activations".strip(","), SLOW)
    sent: dict[str, float] = {"d2h": 0.0, "h2d": 0.0}
    for _ in range(2):
        program = RankProgram(rank)
        program.forward()
        program.backward(later=False, sync=True)
        for op in program.run().sent:
            if op.op in sent:
                sent[op.op] += op.duration_us
    saved_us = sum(x.saved_bytes for x in rank.layers) / RATE * 1e6
    assert sent == pytest.approx({"d2h": 2 * saved_us, "h2d": 2 * saved_us})


@pytest.mark.parametrize(("name", "text"), [*drawn(40, 3, least="offload")])
def test_offloaded_activations_are_never_free(name: str, text: str) -> None:
    """A step is no shorter than without, nor than the bytes that go to the host and come back."""
    text = re.sub(r"offload=\w+", "offload=activations", text)
    plain = ",".join(part for part in text.split(",") if "offload" not in part)
    kept, moved = (outcome(name, t, SLOW, Bare) for t in (plain, text))
    assert moved.iteration_us >= kept.iteration_us * (1 - 1e-9)
    rank = rank_for(name, text, SLOW, Bare)
    stages = [sum(x.saved_bytes for x in s.layers[:-2]) for s in stages_of(rank)]
    ways = 2 * rank.plan.microbatches
    assert moved.iteration_us >= ways * max(stages) / RATE * 1e6 * (1 - 1e-9)


def test_a_copy_runs_beside_the_next_layer_alone() -> None:
    """Memory has room for two layers: the third forward waits for the first one's copy.

    Equal layers of 1 us a call whose copies take long: forward ends after all but the last two
    copies, each of which begins when the one before is done.
    """
    rank = rank_for("gpt", "offload=activations", SLOW, Flat)
    program = RankProgram(rank)
    program.forward()
    run = program.run()
    copies = [s for t, s in zip(run.tasks, run.spans, strict=True) if t.lanes == ("d2h",)]
    work = [s for t, s in zip(run.tasks, run.spans, strict=True) if t.lanes == ("compute",)]
    assert len(copies) == len(work) == len(rank.layers)
    for third, first in zip(work[2:], copies, strict=False):
        assert third.start_us >= first.end_us
    for second, first in zip(work[1:], copies, strict=False):
        assert second.start_us < first.end_us or first.end_us == first.start_us


def copied(name: str, text: str) -> dict[str, float]:
    """Bytes that a rank copies to the GPU and to the host in a step."""
    before, last = micro_batches(rank_for(name, text, SLOW), "adamw")
    found = Counter[str]()
    for run, times in [*before, (last, 1)]:
        for op in run.sent:
            found[op.op] += times * op.nbytes
    return {way: found[way] for way in ("h2d", "d2h")}


def in_shards(name: str, ranks: int, *, numbered: bool = True) -> tuple[int, int]:
    """Bytes of a rank's shards of parameters and gradients; of numbered layers alone, or of all."""
    layers = [x for x in rank_for(name, "").layers if x.numbered or not numbered]
    padded = [[x.layer.padded_bytes(ranks, trained=only) for x in layers] for only in (False, True)]
    parameters, gradients = (sum(each) // ranks for each in padded)
    return parameters, gradients


@pytest.mark.parametrize("name", ["gpt", "frozen"])
def test_shards_are_copied_before_each_gather_and_gradients_after_each_scatter(name: str) -> None:
    """Under zero=3 shards of layers go to the GPU twice in a micro-batch, those of the root once.

    Of frozen weights there is no gradient to go back; layers without one are not gathered again.
    """
    every, gradients = in_shards(name, 4, numbered=False)
    layers, _ = in_shards(name, 4)
    kept = {"h2d": every, "d2h": gradients}
    again = {"h2d": every + layers, "d2h": gradients}
    plan = "dp=4,offload=parameters"
    assert copied(name, f"{plan},zero=2") == kept
    assert copied(name, f"{plan},zero=3") == again
    assert copied(name, f"{plan},zero=3,accumulate=3") == {w: 3 * n for w, n in again.items()}
    assert copied(name, f"{plan},zero=3,hsdp=2")["d2h"] == in_shards(name, 2, numbered=False)[1]


def test_what_is_offloaded_together_is_copied_as_apart() -> None:
    """Parameters and activations of the same step, whichever is named first."""
    each = [copied("gpt", f"dp=4,zero=3,offload={x}") for x in ("parameters", "activations")]
    both = {way: sum(one[way] for one in each) for way in ("h2d", "d2h")}
    for text in ("parameters+activations", "activations+parameters"):
        assert copied("gpt", f"dp=4,zero=3,offload={text}") == both
    found = [
        outcome("gpt", f"dp=4,zero=3,offload={x}").host_memory_bytes
        for x in ("parameters", "activations", "parameters+activations")
    ]
    assert found[2] == found[0] + found[1]


def test_of_adapters_beside_frozen_weights_little_goes_back() -> None:
    """Four layers of 64 x 64 + 64 frozen and two matrices of 4 x 64: in fp32, on four ranks."""
    assert in_shards("frozen", 4) == (4 * 4 * (64 * 64 + 64 + 2 * 256) // 4, 4 * 4 * 2 * 256 // 4)


def test_mixed_precision_copies_shards_in_fp32() -> None:
    """A shard of 8000 weights in bf16 of which 2000 are trained, on two ranks."""
    trained = ParamSpec(name="a", shape=(2000,), dtype="bf16", storage=1, ready_after=0)
    frozen = ParamSpec(name="b", shape=(6000,), dtype="bf16", storage=2, ready_after=-1)
    no_calls = {"forward": (0, 0), "backward": (0, 0), "saved_bytes": 0, "output_bytes": 0}
    layer = Layer(name="blocks.0", parameters=(trained, frozen), **no_calls)
    assert shard_bytes(layer, 2, fp32=False) == (8000, 2000)
    assert shard_bytes(layer, 2, fp32=True) == (6000 + 4000, 4000)


def test_a_cpu_updates_its_shards_once_all_gradients_are_there() -> None:
    """AdamW's calls read and write 21 lists and few step counters; a rank has a quarter of each.

    The host's rate: 12 cores are faster than a GPU's share of the host's memory, 30 GB/s.
    """
    rank = rank_for("gpt", "dp=4,zero=3,offload=parameters", SLOW)
    _, run = micro_batches(rank, "adamw")
    (update,) = run.updates
    lists = 4 * sum(x.layer.trained_numel for x in rank.layers) / 4
    assert host_bytes_per_s(rank.cluster) == 30e9
    assert update.duration_us == pytest.approx(21 * lists / 30e9 * 1e6, rel=1e-4)
    pairs = list(zip(run.tasks, run.spans, strict=True))
    (span,) = (s for t, s in pairs if t.name == update.op)
    assert span.start_us == max(s.end_us for t, s in pairs if t.lanes == ("d2h",))
    assert span.end_us == run.end_us


def test_ranks_of_a_node_share_its_cores_and_memory() -> None:
    """Eight GPUs' host of 112 cores: two ranks have four GPUs' memory each, a core 20 GB/s."""
    node = load_node("dgx-h100")
    two, eight = (rank_for("gpt", f"dp={n}", node=node).cluster for n in (2, 8))
    assert (host_bytes_per_s(two), host_bytes_per_s(eight)) == (4 * 30e9, 30e9)
    few = replace(node, cores=4)
    assert host_bytes_per_s(rank_for("gpt", "dp=4", node=few).cluster) == 20e9


def test_later_gradients_are_added_on_the_host_which_waits_for_them() -> None:
    """A sum reads two lists and writes one; of three micro-batches all but the first have it."""
    rank = rank_for("gpt", "dp=4,zero=3,accumulate=3,offload=parameters", SLOW)
    before, last = micro_batches(rank, "adamw")
    runs = [*(run for run, _ in before), last]
    sums_us = [sum(op.duration_us for op in r.copies if "sum" in op.op) for r in runs]
    one_us = 3 * in_shards("gpt", 4, numbered=False)[1] / 30e9 * 1e6
    assert [times for _, times in before] == [1, 1]
    assert sums_us == pytest.approx([0, one_us, one_us])
    assert last.end_us >= runs[0].end_us


@pytest.mark.parametrize(("name", "text"), [*drawn(30, 5, least="zero", never="offload")])
def test_parameters_in_host_memory_are_never_free(name: str, text: str) -> None:
    """A step takes no less than the copies to the GPU, and then the update on the host."""
    text = f"{text},offload=parameters"
    if not is_legal(name, text):
        return
    moved, rank = outcome(name, text, SLOW, Bare), rank_for(name, text, SLOW, Bare)
    fewest = min(
        sum(shard_bytes(x.layer, rank.plan.shards, fp32=False)[0] for x in s.layers)
        for s in stages_of(rank)
    )
    assert moved.iteration_us >= fewest / RATE * 1e6
    assert moved.host_memory_bytes > 0 and moved.memory["optimizer"] == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("offload=parameters", "needs zero=3, or 2"),
        ("dp=4,zero=1,offload=parameters", "needs zero=3, or 2"),
        ("dp=4,zero=3,ep=2,offload=parameters", "no ep, cdp"),
    ],
)
def test_parameters_that_are_not_sharded_stay_on_the_gpu(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ParallelPlan.parse(text)


def test_a_cpu_has_no_other_memory() -> None:
    with pytest.raises(ValueError, match="a CPU has all parameters in host memory"):
        rank_for("gpt", "dp=4,zero=3,offload=parameters", CPU)
