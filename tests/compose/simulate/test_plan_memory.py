"""Memory of a rank under a plan: by purpose, at its peak, and what a GPU has room for."""

from dataclasses import replace

import pytest
import torch
from law_case import book_for, model, node_of, rank_for
from plan_case import CPU, GPU, Flat, search_of
from torch import nn

from itercast.capture.opcall import ITEMSIZE_BYTES, ParamSpec, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.commands.shared import memory_legend
from itercast.compose.capture_model import capture
from itercast.compose.forecast import forecast
from itercast.compose.graph.layers import Layer
from itercast.compose.graph.lifetimes import MemoryRise, input_bytes, lifetimes
from itercast.compose.parallel.device_memory import FITS, MISFITS, room_bytes
from itercast.compose.pricing import host
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.pricing.optimizer import STATE_COPIES
from itercast.compose.pricing.rank_graph import rank_graph
from itercast.compose.simulate.memory.rank_memory import Sizes, rank_memory
from itercast.compose.simulate.memory.stage_memory import host_memory, stages_held
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.hardware.stack import load_stack


def peak_bytes(capture: StepCapture, optimizer: str) -> int:
    """Parameters and optimizer state, plus the peak of gradients, activations and inputs.

    A storage lives from the call that first touches it to the one that last does. A gradient lives
    from the backward call ``ready_after`` to the end of the step; the storages that backward writes
    and the optimizer reads are those gradients and not counted again, nor are storages that the
    optimizer touches first (its state). Allocator rounding, workspaces and CUDA's context are
    not counted.
    """
    calls = capture.calls
    trained = [p for p in capture.parameters if p.ready_after >= 0]
    fixed = sum(p.nbytes for p in capture.parameters)
    fixed += STATE_COPIES[optimizer] * sum(p.nbytes for p in trained)
    change = [0] * (len(calls) + 1)
    for first, last, nbytes in lifetimes(capture):
        change[first] += nbytes
        change[last + 1] -= nbytes
    for p in trained:
        if p.ready_after < len(calls) and calls[p.ready_after].phase == "backward":
            change[p.ready_after] += p.nbytes
    peak = now = 0
    for delta in change:
        now += delta
        peak = max(peak, now)
    return fixed + peak


def test_folded_memory_is_the_walk_over_all_calls(gpt: StepCapture) -> None:
    """But for what forward reads: the walk sees each tensor die, layers their peaks."""
    runs = [(x, 1) for x in rank_for(gpt, "", CPU).layers]
    found = sum(rank_memory(Sizes.of(runs), ParallelPlan(), "adamw").values())
    given = input_bytes(gpt)
    assert found + given == pytest.approx(peak_bytes(gpt, "adamw"), rel=0.005)


def test_inputs_are_those_of_the_recorded_step() -> None:
    """Two samples of 64 tokens in int64; what a GPU need not compute is no input either."""
    step = capture("gpt-m", batch=2, seq=64, amp=True, dtype="fp16")
    graph = rank_graph(step, ParallelPlan.parse("dp=16,amp"), load_gpu("h100-sxm-80gb"))
    assert graph.input_bytes == input_bytes(step) == 2 * 64 * 8


def block(name: str, nbytes: int, *, late: bool = False) -> PricedLayer:
    """A layer of so many bytes of weights; it saves 500 and needs 50 more in either pass."""
    weight = ParamSpec(name=name, shape=(nbytes // 4,), dtype="fp32", storage=1, ready_after=0)
    sizes = {"saved_bytes": 500, "output_bytes": 0, "from_inputs": late}
    passes = {
        "within_forward": MemoryRise(peak=550, left=500),
        "within_backward": MemoryRise(peak=50, left=-500),
        "peak_bytes": 50 + nbytes,
    }
    no_calls = {"forward": (0, 0), "backward": (0, 0)}
    layer = Layer(name=name, parameters=(weight,), **no_calls, **sizes, **passes)
    ops = dict.fromkeys(("forward", "backward", "accumulate", "into_bucket", "out_of_bucket"), ())
    times = {
        "launches": host.Launches(python_us=0.0, usual_us=0.0, alone_us=0.0),
        "matmul_s": 0.0,
        "weights": frozenset(),
    }
    return PricedLayer(layer=layer, saved_bytes=500, on_cpu=False, **ops, **times)


def test_offloaded_state_is_there_in_the_optimizer_s_step_alone() -> None:
    """100 bytes of weights and of gradients, Adam's state of 200, 50 of work in backward.

    With 500 of activations the peak is in backward: 100 + 100 + 500 + 50, and the state where it is
    not offloaded. With as many temporaries as gradients 10 times the update is larger.
    """

    def peak(offload: str, update: float) -> int:
        plan = ParallelPlan(offload=offload)
        sizes = Sizes.of([(block("blocks.0", 100), 1)])
        return sum(rank_memory(sizes, plan, "adamw", update).values())

    assert (peak("", 0), peak("optimizer", 0)) == (950, 750)
    assert (peak("", 10), peak("optimizer", 10)) == (1400, 1400)


def test_offloaded_activations_are_back_where_their_backward_runs_alone() -> None:
    """Three layers that save 500 bytes each, and whose gradients are 10,000.

    Most is held in the first one's backward: all gradients, 50 of work and its own 500, offloaded
    or not. With gradients of 100 it is in the last one's, 1,500 + 150; offloaded in the middle
    one's: its own and the first one's 1,000, the last one's gradients of 100, and 150.
    """

    def peak(nbytes: int, offload: str) -> int:
        sizes = Sizes.of([(block(f"blocks.{i}", nbytes), 1) for i in range(3)])
        found = rank_memory(sizes, ParallelPlan(offload=offload), "none")
        return sum(found.values()) - found["parameters"]

    assert peak(10_000, "") == peak(10_000, "activations") == 30_000 + 550
    assert (peak(100, ""), peak(100, "activations")) == (1650, 1250)


@pytest.mark.parametrize(
    ("dtype", "plan", "held"),
    [
        ("bf16", "dp=8", 2 + 4 + 12),
        ("fp16", "dp=8", 2 + 2 + 16),
        ("bf16", "dp=8,zero=1", 2 + 4 + 12 / 8),
        ("fp16", "dp=8,zero=1,accumulate=2", 2 + 2 + 16 / 8),
        ("fp32", "", 4 + 4 + 8),
    ],
)
def test_megatron_holds_fp32_copies_of_half_precision_weights(
    dtype: str, plan: str, held: float
) -> None:
    """8000 weights: one in 16 bit, a summed gradient, fp32 copies and moments, which zero=1 shards.

    Gradients of bf16 are summed in fp32; those of fp16 are copied to fp32. No buckets beside them.
    With 500 saved and 50 of work in backward.
    """
    size = ITEMSIZE_BYTES[dtype]
    one = block("blocks.0", 8000 * size)
    weight = replace(one.layer.parameters[0], shape=(8000,), dtype=dtype)
    one = replace(one, layer=replace(one.layer, parameters=(weight,)))
    stack = load_stack("megatron-core").held
    sizes = Sizes.of([(one, 1)])
    found = rank_memory(sizes, ParallelPlan.parse(plan), "adamw", held=stack)
    assert sum(found.values()) == 8000 * held + 550
    assert sum(rank_memory(sizes, ParallelPlan(), "adamw").values()) == 8000 * 4 * size + 550


class Chain(nn.Module):
    """Four products of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("schedule", "first", "last"),
    [
        ("1f1b", [(1 * 128, 256, False)], [(0, 256 + 64, False)]),
        (
            "gpipe",
            [(3 * 128, 256, True), (2 * 128, 256, False)],
            [(3 * 68, 256 + 4 * 64, True), (2 * 68, 256 + 3 * 64, False)],
        ),
    ],
)
def test_stages_hold_messages_of_all_micro_batches_and_results_of_those_in_flight(
    schedule: str, first: list[object], last: list[object]
) -> None:
    """Four micro-batches of two rows, 64 bytes each time they cross to another layer.

    The first stage saves its two products' results of each micro-batch in flight; the last one its
    first product's and the loss, 4 bytes, and it holds what the loss reads. Each has memory for
    four messages. In gpipe the first backward makes the gradients, later ones hold less.
    """
    step = capture(Chain(), torch.ones(2, 8), batch=2, loss=torch.Tensor.sum)
    rank = rank_for(step, f"pp=2,micro=4,schedule={schedule}", GPU)
    found = [[tuple(moment)[1:] for moment in stage] for stage in stages_held(rank)]
    assert found == [first, last]


def test_fsdp_gathers_two_layers_and_the_root() -> None:
    """Two ranks under zero=3 without optimizer state; a rank's shards are half of all.

    Two blocks of 8000: in backward of the first one its weights, its gradients and 50, the message
    with the second one's gradients and a half of these, and 500 saved. Where blocks read no
    activation, the second one's weights and gradients are whole there. A block and a root of 800:
    in the block's backward its weights and gradients, 50, 500, the root's weights and gradients.
    """

    def peak(*runs: tuple[PricedLayer, int]) -> int:
        plan = ParallelPlan.parse("dp=2,zero=3")
        return sum(rank_memory(Sizes.of(runs), plan, "sgd").values())

    assert peak((block("blocks.0", 8000), 2)) == 8000 + (8000 + 8050 + 8000 + 4000 + 500)
    late = block("blocks.0", 8000, late=True)
    assert peak((late, 2)) == 8000 + (8000 + 8050 + 8000 + 8000 + 500)
    root = (block("last", 800), 1)
    assert peak((block("blocks.0", 8000), 1), root) == 4400 + (8000 + 8050 + 500 + 800 + 800)


def test_shards_in_host_memory_are_on_the_gpu_on_their_way_alone() -> None:
    """Two ranks under zero=3 with Adam's states; a rank's shards are half of all.

    Two blocks of 8000: in backward of the second one its weights and gradients, 50 and 1000 saved,
    the first one's weights and the shard that they are gathered of. No shard stays.
    """
    plan = ParallelPlan.parse("dp=2,zero=3,offload=parameters")
    found = rank_memory(Sizes.of([(block("blocks.0", 8000), 2)]), plan, "adamw")
    assert found["parameters"] == found["optimizer"] == found["gradients"] == 0
    assert sum(found.values()) == 8000 + 8050 + 1000 + 8000 + 4000


def test_host_memory_has_what_is_offloaded() -> None:
    """Of the small GPT in fp32 on two ranks: weights, gradients and two states, each a half."""

    def host(text: str) -> int:
        return host_memory(rank_for("gpt", text), "adamw")

    layers = rank_for("gpt", "").layers
    half = sum(x.layer.padded_bytes(2, trained=True) for x in layers) // 2
    assert host("dp=2,zero=3") == 0
    assert host("dp=2,zero=3,offload=optimizer") == pytest.approx(2 * half, rel=0.01)
    assert host("dp=2,zero=3,offload=parameters") == pytest.approx(4 * half, rel=0.01)
    assert host("dp=2,zero=3,offload=activations") == sum(x.saved_bytes for x in layers)


def test_what_a_host_has_no_memory_for_does_not_fit() -> None:
    """Of two ranks of a host each offloads a half: memory of both does, a byte less does not."""
    plan, step = ParallelPlan.parse("dp=2,zero=3,offload=parameters"), model("gpt")
    each = host_memory(rank_for("gpt", str(plan)), "adamw")
    book, search = book_for(Flat, GPU), search_of()
    nodes = [node_of(memory_bytes=2 * each + more) for more in (0, -1)]
    found = [forecast(step, plan, book, node) for node in nodes]
    assert [one.fits for one in found] == [True, False]
    assert found[0].memory_verdict == FITS
    assert found[1].memory_verdict.startswith(MISFITS) and "toy has" in found[1].memory_verdict
    (told,) = memory_legend(found)
    assert told.startswith("!: 2 x ")
    scored = [
        search.scored(rank_for("gpt", str(plan), node=node_of(memory_bytes=n)), 1.0).fits
        for n in (0, 2 * each, 2 * each - 1)
    ]
    assert scored == [True, True, False]


def test_tensor_parallel_ranks_share_the_optimizer_s_temporaries(gpt: StepCapture) -> None:
    """AdamW's temporaries are in proportion to a rank's own parameters; whole, tp=1 and tp=2."""
    one, two = (rank_for(gpt, text, CPU) for text in ("", "tp=2"))
    assert one.model.graph.update_share == two.model.graph.update_share > 0
    size = sum(p.nbytes for p in gpt.parameters)
    own = sum(p.nbytes for p in two.model.graph.capture.parameters)
    assert own < 0.7 * size  # the embedding table and position vectors are whole
    runs = [[(x, 1) for x in r.layers] for r in (one, two)]
    updates = [rank_memory(Sizes.of(each), ParallelPlan(), "adamw", 100.0) for each in runs]
    assert [m["temporary"] for m in updates] == [100 * size, 100 * own]


def test_room_for_tensors_by_hand() -> None:
    """CUDA shows 99 % of 80 GiB; less a context, NCCL by axis, and 4 % that the allocator keeps."""
    gpu = load_gpu("h100-sxm-80gb")
    seen = 0.99 * 80 * 2**30
    assert room_bytes(gpu, ParallelPlan()) == int((seen - 0.5e9) / 1.04)
    three = ParallelPlan.parse("dp=2,tp=2,pp=2")
    assert room_bytes(gpu, three) == int((seen - 0.5e9 - 3 * 0.56e9) / 1.04)
    experts = ParallelPlan.parse("dp=8,ep=8")
    assert room_bytes(gpu, experts) == int((seen - 0.5e9 - 2 * 0.56e9 - 3.28e9) / 1.04)
    assert room_bytes(CPU, three) == CPU.hbm_bytes
