"""Experts in one grouped product: over ranks, in fp8, and on GPUs without such a kernel."""

from dataclasses import replace

import pytest
import torch
from plan_case import Fixed
from torch import nn
from unseen_ops import GPU, MODELS, learned

from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.graph.product_roles import DTYPE_CAST, alias_weight_casts
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.notes import CAST_WEIGHTS, WIDE_EXPERTS, notes
from itercast.compose.parallel.ep import expert_parallel, expert_weights
from itercast.compose.parallel.mixed_precision import experts_in_half, module_in_half
from itercast.compose.parallel.narrow import CAST
from itercast.compose.pricing.fallbacks import fallback_parts
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import priceable
from itercast.compose.pricing.rank_graph import rank_graph
from itercast.microbench.ops.matrix.gemm import GROUPED, Gemm, from_grouped

TOKENS, WIDTH, HIDDEN, EXPERTS = 64, 16, 32, 4


class Experts(nn.Module):
    """Two layers of experts; tokens are sorted by expert, as many for each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (TOKENS // EXPERTS)
        hidden = torch._grouped_mm(x, self.up, ends).relu()
        return torch._grouped_mm(hidden, self.down.transpose(1, 2), ends)


class Net(nn.Module):
    """A linear layer, and two blocks of a router and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.routers = nn.ModuleList(nn.Linear(WIDTH, EXPERTS, bias=False) for _ in "ab")
        self.blocks = nn.ModuleList(Experts() for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for router, block in zip(self.routers, self.blocks, strict=True):
            x = x * router(x).sum(1, keepdim=True) + block(x)
        return x


def step(dtype: str = "bf16") -> StepCapture:
    make = lambda: (Net(), torch.randn(TOKENS, WIDTH), lambda y: y.square().mean())  # noqa: E731
    return capture(make, dtype=dtype)


def grouped(found: StepCapture) -> list[Gemm]:
    asked = [from_grouped(c) for c in found.calls if c.op == GROUPED]
    return [p for p in asked if p is not None]


def test_products_of_experts_are_in_tf32_where_asked() -> None:
    assert {c.args[0].dtype for c in step("tf32").calls if c.op == GROUPED} == {"tf32"}


def test_the_busiest_rank_has_more_tokens_than_the_mean() -> None:
    """They are rows, and the summed dimension in a weight's gradient."""
    skewed = expert_parallel(step(), ParallelPlan(dp=2, ep=2, imbalance=1.5))
    assert {p.k if p.layout == "tn" else p.m for p in grouped(skewed)} == {48}  # 1.5 * 32


def test_a_token_goes_to_as_many_experts_as_their_rows_are_times_the_routers() -> None:
    """``Net`` has as many rows; moe-l two for each token, whatever the imbalance."""
    for found, routed in ((step(), (4, 1)), (capture("moe-l"), (8, 2))):
        plan = ParallelPlan.parse("dp=2,ep=2:1.5,ep_once")
        sent = [c for c in expert_parallel(found, plan).calls if c.op == COLLECTIVE]
        assert {c.kwargs["routed"] for c in sent} == {routed}


def test_a_rank_casts_its_own_experts_only() -> None:
    """Under autocast with ep=4 it casts a quarter of them."""
    kept = capture("moe-s", dtype="bf16", amp=True)
    made = expert_parallel(kept, ParallelPlan(dp=4, ep=4))
    assert sum(c.op == COLLECTIVE for c in made.calls) == 8
    own = expert_weights(alias_weight_casts(kept))
    cast = [
        sum(c.args[0].numel for c in m.calls if c.op == DTYPE_CAST and c.args[0].storage in own)
        for m in (kept, made)
    ]
    assert cast[0] == 4 * cast[1] > 0


def test_gradients_of_own_experts_alone_are_cast_back() -> None:
    """Under autocast with ep=2 a rank casts half of the stacks' gradients, as of the stacks."""
    cast = experts_in_half(mixed())
    sizes = [
        sum(
            c.outputs[0].numel
            for c in m.calls
            if c.op == DTYPE_CAST and len(c.args[0].shape) == 3 and c.phase == "backward"
        )
        for m in (cast, expert_parallel(cast, ParallelPlan(dp=2, ep=2)))
    ]
    assert sizes[0] == 2 * sizes[1] == 4 * EXPERTS * WIDTH * HIDDEN


def test_experts_are_in_fp8_but_not_routers() -> None:
    """Inputs of a grouped product are cast once and used again for its gradients."""
    found = step("fp8")
    assert {c.args[0].dtype for c in found.calls if c.op == GROUPED} == {"fp8"}
    assert {(p.op, p.layout, p.batch) for p in grouped(found)} == {("scaled_mm", "nt", EXPERTS)}
    routed = [c for c in found.calls if c.op == "aten.mm.default"]
    assert {t.dtype for c in routed for t in c.args} == {"bf16"}
    casts = [c for c in found.calls if c.op == CAST]
    assert [c.phase for c in casts] == ["forward"] * 4 + ["backward"] * 4


class Mixed(Net):
    """The same, with fp32 in and out of the experts, as after a norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).float()
        for router, block in zip(self.routers, self.blocks, strict=True):
            x = x * router(x).float().sum(1, keepdim=True) + block(x)
        return x


def mixed() -> StepCapture:
    """The step of ``Mixed`` under autocast to bf16, captured as it runs."""
    make = lambda: (Mixed(), torch.randn(TOKENS, WIDTH), lambda y: y.square().mean())  # noqa: E731
    return capture(make, dtype="bf16", amp=True)


def test_autocast_leaves_experts_in_fp32_and_says_so() -> None:
    """FSDP's mixed precision and Megatron-LM cast them: of products alone the dtype changes."""
    found = mixed()
    assert {p.dtype for p in grouped(found)} == {"fp32"}
    cast = experts_in_half(found)
    assert [replace(p, dtype="fp32") for p in grouped(cast)] == grouped(found)
    assert {p.dtype for p in grouped(cast)} == {"bf16"}
    assert experts_in_half(step()) == step()  # weights in bf16: nothing to cast

    gpu = replace(GPU, peak_flops_per_s={"fp32": 1e12, "bf16": 1e12})

    def in_half(text: str, stack: str) -> bool:
        graph = rank_graph(found, ParallelPlan.parse(text), gpu, stack)
        return {p.dtype for p in grouped(graph.capture)} == {"bf16"}

    assert not in_half("amp", "torch-2.11") and not in_half("dp=8,amp", "torch-2.11")
    assert in_half("dp=8,amp", "megatron-core")
    said = {
        text: list(notes(found, ParallelPlan.parse(text), "torch-2.11"))
        for text in ("amp", "dp=8,zero=3,amp", "")
    }
    assert said == {"amp": [WIDE_EXPERTS], "dp=8,zero=3,amp": [CAST_WEIGHTS], "": []}


class Words(nn.Module):
    """Logits over a vocabulary of 50 words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(words)).relu())


def test_under_fsdp_the_loss_and_the_update_are_in_fp32_all_else_in_half() -> None:
    """As code runs that casts its logits (torchtitan, transformers) and holds shards in fp32."""
    words = torch.zeros(TOKENS, dtype=torch.long)
    plain = lambda y: nn.functional.cross_entropy(y, torch.zeros_like(words))  # noqa: E731

    def calls(found: StepCapture, *phases: str) -> list[tuple[str, tuple[str, ...]]]:
        some = [c for c in found.calls if c.phase in phases and "_like" not in c.op]
        return [(c.op, tuple(t.dtype for t in c.touched if t.shape)) for c in some]

    run = ("forward", "loss", "backward")
    half, casting = (
        capture(lambda f=f: (Words(), words, lambda y: plain(f(y))), dtype="bf16")
        for f in (torch.Tensor.bfloat16, torch.Tensor.float)
    )
    made = module_in_half(half)
    assert calls(made, *run) == calls(casting, *run) == calls(module_in_half(casting), *run)
    assert [d for op, (d, *_) in calls(made, *run) if "softmax" in op] == ["fp32", "fp32"]
    assert {d for op, of in calls(made, "optimizer") for d in of} == {"fp32"}
    assert {p.dtype for p in made.parameters} == {"bf16"}  # as they are gathered


def _back_casts(found: StepCapture) -> int:
    """Gradients of tokens that autocast itself casts back to fp32."""
    casts = [c for c in found.calls if c.op == DTYPE_CAST and c.phase == "backward"]
    return sum(c.args[0].shape == (TOKENS, WIDTH) and c.outputs[0].dtype == "fp32" for c in casts)


def test_casts_of_experts_are_counted_by_hand() -> None:
    """Two layers of two weights each: inputs and weights are cast once, gradients of weights back.

    The sum's gradient is cast once for both products of ``down``; between the products all is half.
    """
    found, cast = mixed(), experts_in_half(mixed())
    casts = [
        [c for c in m.calls if c.op == DTYPE_CAST and len(c.args[0].shape) == 3]
        for m in (found, cast)
    ]
    assert [len(c) for c in casts] == [0, 2 * 2 * 2]
    relu = [c for c in cast.calls if c.op == "aten.relu.default"]
    assert {t.dtype for c in relu for t in (*c.tensors(), *c.outputs)} == {"bf16"}
    assert [p.shape for p in cast.parameters] == [p.shape for p in found.parameters]
    written = {t.storage: t.dtype for c in cast.calls if c.phase == "backward" for t in c.outputs}
    read = [c for c in cast.calls if c.phase == "optimizer"]
    gradients = {t.storage for c in read for t in c.tensors()} & written.keys()
    assert gradients and {written[s] for s in gradients} == {"fp32"}
    inputs = [c for c in cast.calls if c.op == DTYPE_CAST and c.args[0].shape == (TOKENS, WIDTH)]
    back = [c.outputs[0].dtype for c in inputs if c.phase == "backward"]
    assert back.count("fp32") - _back_casts(found) == 2  # gradients of the experts' inputs


@pytest.mark.parametrize(
    ("architecture", "dtype", "times"),
    [("hopper", "bf16", 0), ("hopper", "fp32", 8), ("ampere", "bf16", 8)],
)
def test_without_a_kernel_for_all_experts_they_run_one_by_one(
    architecture: str, dtype: str, times: int
) -> None:
    p = Gemm(op="grouped_mm", m=16, n=32, k=64, batch=8, dtype=dtype)
    gpu = replace(GPU, architecture=architecture)
    found = fallback_parts(p, MODELS, False, gpu)
    assert [(part.params, part.times) for part in found] == [
        (replace(p, op="mm", batch=1), times) for _ in range(bool(times))
    ]
    measured = {**MODELS, "gemm": learned("mm", "grouped_mm", dtype=dtype)}
    assert fallback_parts(p, measured, False, gpu) == []
    other = replace(gpu, name="other")  # how others run it tells nothing
    assert bool(fallback_parts(p, measured, False, other)) is bool(times)


def test_a_cpu_takes_experts_one_by_one() -> None:
    call: OpCall = next(c for c in step().calls if c.op == GROUPED)
    cpu = replace(GPU, kind="cpu")
    pricer = Fixed()
    pricer.models = {"gemm": learned("mm", gpu=cpu)}
    book = PriceBook(pricer, cpu, threads=1)
    assert book.price([priceable(call)])[0].duration_us == 10 * EXPERTS
    assert book.prices["gemm"].keys() == {Gemm(m=16, n=32, k=16, layout="nn", dtype="bf16")}


def test_a_product_by_expert_in_fp8_is_one_of_all_tokens() -> None:
    """Beside what its cast takes: that of few columns, and reading all tokens."""
    p = Gemm(op="scaled_mm", m=16, n=512, k=64, batch=8, layout="nt", dtype="fp8")
    serving = {**MODELS, "gemm": learned("scaled_mm", dtype="fp8", stack="vllm-0.24.0")}
    whole, cast, read = fallback_parts(p, serving, False, GPU)
    assert whole.params == replace(p, m=128, batch=1)
    assert (cast.params.n, cast.params.m, cast.times) == (32, 128, -1)
    assert read.params.numel == 128 * 64 // 8
    own = {**MODELS, "gemm": learned("scaled_mm", dtype="fp8")}
    assert fallback_parts(p, own, False, GPU) == [replace(whole, times=1)]
