"""The optimizer's step of old software, and what a GradScaler adds before it, counted by hand."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_case import GPU, Fixed, call, tensor

from itercast.capture.base.slow_imports import torch
from itercast.capture.opcall import OpCall, ParamSpec, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.capture.programs.program import ON_CPU
from itercast.capture.step import StepSettings, make_optimizer
from itercast.compose.capture_model import capture
from itercast.compose.forecast import forecast
from itercast.compose.graph.launch_modes import launches
from itercast.compose.graph.product_roles import DTYPE_CAST
from itercast.compose.pricing.optimizer import one_by_one, with_loops
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import Priceable, priceable
from itercast.compose.programs.price import price_rank
from itercast.compose.simulate.memory.stage_memory import stage_memory
from itercast.compose.simulate.replicas import micro_batches
from itercast.extras.trace.forecasts import shown_rank
from itercast.microbench.ops.step.optimizer import UNSCALE
from itercast.script_orders import captured, script_order

OLD, NEW = "torch-1.13", "torch-2.0"
LOOPED = ["mul_", "mul_", "add_", "mul_", "addcmul_", "sqrt", "div_", "add_", "addcdiv_"]


CLIPPED = ["linalg_vector_norm", "mul_"]
AVERAGED = ["mul_", "add_"]
SCRIPT = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(16)]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=FUSED)
for _ in range(9):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def small_step(optimizer: str = "adamw") -> StepCapture:
    """A step of one linear layer: a weight of 12 elements, and a bias of 3."""
    images = torch.zeros(2, 4)
    return capture(torch.nn.Linear(4, 3), images, lambda out: out.sum(), optimizer=optimizer)


def names(calls: Any) -> list[str]:
    """Names of ops without namespace and overload."""
    return [c.op.split(".")[1] for c in calls]


def bytes_of(c: Priceable) -> float:
    assert c.family is not None
    return float(c.family.bytes_moved(c.params))


def test_a_loop_makes_nine_calls_over_each_parameter_of_adamw() -> None:
    """They read or write 23 tensors: 2 + 2 + 3 + 2 + 4 + 2 + 2 + 2 + 4; zeroing a gradient 1."""
    calls = one_by_one(small_step(), [12, 3], GPU)
    assert names(calls) == [*LOOPED, *LOOPED, "zero_", "zero_"]
    assert sum(map(bytes_of, calls)) == (23 + 1) * (12 + 3) * 4


def test_a_loop_clips_before_its_update_and_moves_averages_after_it() -> None:
    """Of a norm a gradient is read, by its scale it is read and written: 3 tensors; averages 5."""
    calls = one_by_one(small_step("adamw+clip+ema"), [12, 3], GPU)
    each = [*CLIPPED, *LOOPED, *AVERAGED]
    assert names(calls) == [*each, *each, "zero_", "zero_"]
    norms = 2 * 4  # one number each
    assert sum(map(bytes_of, calls)) == (3 + 23 + 5 + 1) * (12 + 3) * 4 + norms


def test_a_script_s_calls_over_lists_become_the_loop_of_a_plan() -> None:
    """Nine calls over the weight, nine over the bias; two gradients are added to and zeroed."""
    step = small_step("adamw+clip")
    looped, plan = with_loops(step), one_by_one(step, [12, 3], GPU)
    added = Counter(names(looped.calls)) - Counter(names(step.calls))
    assert added == Counter([*names(plan), "add_", "add_"])
    assert " ".join([*LOOPED, *LOOPED]) in " ".join(names(looped.calls))
    sizes = [c.outputs[0].numel for c in looped.calls if c.op.startswith("aten.zero_")]
    assert sorted(sizes) == [3, 12]


def test_a_loop_decays_weights_and_leaves_the_scaler_s_kernel_whole() -> None:
    """SGD adds decayed weights to gradients, out of place: two sums over each of two tensors.

    GradScaler always took lists. Gradients are added to and set to zero, too.
    """
    gradients, weights, sums = ((tensor(n, 8), tensor(n + 1, 8)) for n in (0, 2, 4))
    made = OpCall(op="aten.mm.default", args=(), outputs=gradients, phase="backward")
    scaled = OpCall(op=f"aten.{UNSCALE}.default", args=(gradients,), phase="optimizer")
    decayed = OpCall(op="aten._foreach_add.List", args=(gradients, weights), outputs=sums)
    updated = OpCall(op="aten._foreach_add_.List", args=(weights, sums), phase="optimizer")
    looped = with_loops(StepCapture(calls=(made, scaled, decayed, updated))).calls
    assert names(looped) == ["mm", UNSCALE, *["add_"] * 2, *["add_"] * 4, *["zero_"] * 2]
    assert bytes_of(priceable(decayed)) == bytes_of(priceable(updated)) == 3 * 2 * 8 * 4


def test_a_loop_stays_on_its_stream_and_the_hosts_calls_stay() -> None:
    lists = ((tensor(0, 8), tensor(1, 8)), (tensor(2, 8), tensor(3, 8)))
    for stream, count in ((7, 2), (ON_CPU, 1)):
        call = OpCall(op="aten._foreach_add_.List", args=lists, phase="optimizer", stream=stream)
        looped = with_loops(StepCapture(calls=(call,))).calls
        assert [c.stream for c in looped] == [stream] * count


@pytest.mark.parametrize(("fused", "captured_calls"), [("None", 8), ("True", 1)])
def test_a_script_under_old_software_launches_a_loop(
    tmp_path: Path, fused: str, captured_calls: int
) -> None:
    """Over 16 matrices of 64 x 64 the host launches 16 x (9 + 2) calls in place of 8 or one."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("FUSED", fused))
    launches = {}
    for stack in (OLD, NEW):
        order = script_order(str(tmp_path / "train.py"), gpu="v100-sxm-16gb", stack=stack)
        priced = price_rank(captured(order).ranks[0], order.target.book, None, 8, 1)
        launches[stack] = sum(op is not None for op in priced.ops)
    assert launches[OLD] - launches[NEW] == 16 * (9 + 2) - captured_calls


def test_calls_over_all_parameters_clip_and_average() -> None:
    """A norm and a scale before AdamW's eight calls, two for averages after it."""
    beside = Counter(run_of(small_step("adamw+clip+ema"), NEW))
    beside.subtract(run_of(small_step(), NEW))
    of_lists = {name: n for name, n in beside.items() if name.startswith("_foreach")}
    assert {name: n for name, n in of_lists.items() if n} == {
        "_foreach_norm": 1,
        "_foreach_mul_": 2,
        "_foreach_add_": 1,
    }


@pytest.mark.parametrize("plan", ["", "dp=2,zero=2"])
def test_an_average_is_one_more_copy_of_a_rank_s_parameters(plan: str) -> None:
    """Of 12 + 3 elements in fp32, or of a rank's half of them."""
    found = []
    for optimizer in ("adamw+clip", "adamw+clip+ema"):
        book, parsed = PriceBook(Fixed(), GPU, 0), ParallelPlan.parse(plan)
        step = small_step(optimizer)
        rank = shown_rank(step, parsed, book)
        found.append(stage_memory(rank, optimizer)[0]["optimizer"])
    assert found[1] - found[0] == (30 if plan else 60)


@pytest.mark.parametrize("optimizer", ["adamw+ema+clip", "muon+clip", "none+ema", "adam+ema"])
def test_what_may_follow_an_optimizers_name(optimizer: str) -> None:
    with pytest.raises(ValueError, match="optimizer '"):
        StepSettings(optimizer=optimizer)
    with pytest.raises(ValueError, match=r"mode 'train\+clip': allowed are"):
        StepSettings(mode="train+clip")
    with pytest.raises(ValueError, match=r"optimizer 'sgd\+clip': no optimizer of this name"):
        make_optimizer([torch.ones(2)], "sgd+clip")  # clipping is of the step


@pytest.mark.parametrize(("stack", "held"), [(OLD, 60), (NEW, 0)])
def test_old_software_holds_gradients_while_the_next_forward_runs(stack: str, held: int) -> None:
    """Of 12 + 3 elements in fp32; newer software frees them, and is fullest in backward."""
    rank = shown_rank(small_step("sgd"), ParallelPlan(), PriceBook(Fixed(), GPU, 0, stack=stack))
    (found,) = stage_memory(rank, "sgd")
    assert (found["parameters"], found["gradients"]) == (60, held)


@pytest.mark.parametrize(
    ("optimizer", "loop"), [("sgd_momentum", "mul_ add_ add_"), ("sgd", "add_")]
)
def test_a_loop_of_sgd(optimizer: str, loop: str) -> None:
    """Momentum is scaled, gets the gradient, and goes to the parameter: three calls for each."""
    calls = one_by_one(small_step(optimizer), [12], GPU)
    assert names(calls) == [*loop.split(), "zero_"]


def test_a_tensor_that_fits_in_the_cache_stays_there_from_call_to_call() -> None:
    """Parameter and gradients come from memory; what was just written does not."""
    gpu = replace(GPU, l2_bytes=1e6)
    small, large = (one_by_one(small_step(), [n], gpu)[:9] for n in (1000, 10**8))
    assert [round(c.cold, 2) for c in small[:3]] == [1.0, 1.0, 0.5]
    assert {c.cold for c in large} == {1.0}


def run_of(step: StepCapture, stack: str, plan: str = "dp=2") -> list[str]:
    """Names of what a GPU runs in a step, in order."""
    book = PriceBook(Fixed(), GPU, 0, stack=stack)
    rank = shown_rank(step, ParallelPlan.parse(plan), book)
    _, run = micro_batches(rank, step.optimizer)
    own = (t.name for t in run.tasks if t.lanes == ("compute",))
    return [name.split(".")[1] for name in own if "." in name]


def test_old_software_adds_to_gradients_that_it_set_to_zero() -> None:
    """Forward and backward alike; a gradient is added, a loop is in place of nine calls."""
    old, new = (Counter(run_of(small_step(), stack)) for stack in (OLD, NEW))
    assert old - new == Counter(2 * [*LOOPED, "zero_", "add_"])
    assert sum(n for name, n in (new - old).items() if name.startswith("_foreach")) == 8 + 1


@pytest.mark.parametrize("optimizer", ["adamw_fused", "lamb"])
def test_kernels_of_an_optimizers_own_are_of_no_age(optimizer: str) -> None:
    """apex had them before; they drop gradients."""
    step = small_step(optimizer)
    assert run_of(step, OLD) == run_of(step, NEW)


def test_sharded_updates_are_no_loop_over_whole_parameters() -> None:
    """FSDP's parameters are flat, one for each layer that it wraps."""
    step = small_step()
    assert run_of(step, OLD, "dp=2,zero=2") == run_of(step, NEW, "dp=2,zero=2")


def test_a_loop_that_was_captured_stays_as_it_is() -> None:
    """Sparse gradients make SGD one; so do steps that update nothing."""
    table, images = torch.nn.EmbeddingBag(8, 4, sparse=True), torch.zeros(2, 3, dtype=torch.int64)
    step = capture(table, images, lambda out: out.sum(), optimizer="sgd")
    updated = half_step("bf16", "sgd")
    frozen = replace(updated, calls=updated.calls[:3])
    for one in (step, frozen):
        assert run_of(one, OLD, "") == run_of(one, NEW, "")


def half_step(dtype: str = "fp16", optimizer: str = "adamw_fused") -> StepCapture:
    """Four ops under autocast: a cast of the weight, a product forward and backward, an update."""
    wide, half, x = tensor(0, 4, 4), tensor(1, 4, 4, dtype=dtype), tensor(2, 4, 4, dtype=dtype)
    out, grad = tensor(3, 4, 4, dtype=dtype), tensor(4, 4, 4)
    calls = (
        OpCall(op=DTYPE_CAST, args=(wide,), outputs=(half,)),
        call("mm.default", [x, half], out),
        call("mm.default", [x, out], grad, phase="backward"),
        OpCall(op="aten._foreach_mul_.Scalar", args=((grad,), 0.5), phase="optimizer"),
    )
    parameters = (ParamSpec(name="w", shape=(4, 4), dtype="fp32", storage=0, ready_after=2),)
    return StepCapture(calls=calls, parameters=parameters, optimizer=optimizer)


class Known(Fixed):
    """Ops of these families take a GPU 10 us; each launch takes its host 5."""

    models: Any = dict.fromkeys(("gemm", "elementwise", "optimizer"))


def iteration_us(dtype: str, optimizer: str, stack: str = NEW, plan: str = "amp") -> float:
    book = PriceBook(Known(), GPU, 0, stack=stack)
    return forecast(half_step(dtype, optimizer), ParallelPlan.parse(plan), book).iteration_us


def test_a_scaler_reads_gradients_and_makes_the_host_wait() -> None:
    """Four kernels hide their launches; in fp16 comes one over gradients, and then the host waits.

    compute |   |=10=|=10=|=10=|=10=|=10=|    update, cast, forward, backward, unscale
    host    |=5=|=5=|=5=|=5=|=5=|=5=|              it knows of no infinite gradient only then
    """
    assert iteration_us("bf16", "lamb") == pytest.approx(4 * 10)
    assert iteration_us("fp16", "lamb") == pytest.approx(5 + 5 * 10)
    assert iteration_us("fp16", "lamb", plan="") == pytest.approx(4 * 10)  # no autocast


@pytest.mark.parametrize("optimizer", ["lamb", "adamw_fused"])
def test_software_with_copies_of_fp16_weights_scales_the_loss_itself(optimizer: str) -> None:
    """As a GradScaler does, and no fused kernel of torch's spares its host the wait."""
    found = iteration_us("fp16", optimizer, "megatron-core", plan="")
    assert found == pytest.approx(5 + 5 * 10)


def test_a_fused_optimizer_of_torch_skips_a_step_without_the_host() -> None:
    """Its kernel reads whether a gradient is not finite; apex's, before torch 2.0, does not."""
    assert iteration_us("fp16", "adamw_fused") == pytest.approx(5 * 10)
    assert iteration_us("fp16", "adamw_fused", OLD) == iteration_us("fp16", "lamb", OLD)


def test_without_an_update_nothing_is_scaled() -> None:
    assert iteration_us("fp16", "none") == iteration_us("bf16", "none")


def test_a_scalers_kernel_reads_and_writes_each_gradient_once() -> None:
    """Of 100 + 50 gradients in fp32, by two launches: one takes the tensors of 110 at most."""
    gradients = tuple(tensor(i, 64) for i in range(150))
    unscale = OpCall(op=f"aten.{UNSCALE}.default", args=(gradients,), phase="optimizer")
    assert bytes_of(priceable(unscale)) == 2 * 150 * 64 * 4
    assert launches(StepCapture(calls=(unscale,))) == 2
