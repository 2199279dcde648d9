"""Conservation inside a layer: what all ranks of a plan do together is what one process does.

Products, attention, parameters and weights read are counted over all ranks. What a plan states to
copy, and nothing else, is counted once more on every other rank: ``COPIED_PRODUCTS`` and
``COPIED_PARAMETERS`` name it. Models are small, their architectures those of published ones.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from law_case import outcome
from plan_case import GPU, Flat

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.graph.launch_modes import as_launched, with_engine
from itercast.compose.graph.layers import split_layers
from itercast.compose.graph.product_roles import alias_weight_casts
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.parallel.cp import context_parallel
from itercast.compose.parallel.ep import expert_parallel, expert_weights
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.parallel.tp import PRODUCTS, tensor_parallel
from itercast.compose.pricing.layer_prices import price_model
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import priceable
from itercast.compose.pricing.rank_graph import rank_graph
from itercast.microbench.ops import find_family

HALVES = replace(GPU, peak_flops_per_s={"fp32": 1e12, "bf16": 1e12}, l2_bytes=1e6)
BATCH, SEQ, WIDTH, HEADS, VOCAB = 2, 16, 64, 8, 192
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS}
GATED = {**SIZES, "intermediate_size": 2 * WIDTH, "num_key_value_heads": HEADS}
GPT2 = {"n_embd": WIDTH, "n_layer": 1, "n_head": HEADS, "n_positions": SEQ}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": GPT2,  # Conv1D: weights are stored (in, out)
    "OPTForCausalLM": {**SIZES, "ffn_dim": 256, "word_embed_proj_dim": WIDTH},
    "GPTNeoXForCausalLM": {**SIZES, "intermediate_size": 256},  # q, k, v interleaved by heads
    "GPTJForCausalLM": {**GPT2, "rotary_dim": 4},  # attention beside the MLP
    "BloomForCausalLM": {"hidden_size": WIDTH, "n_layer": 1, "n_head": HEADS},  # alibi
    "FalconForCausalLM": {**SIZES, "new_decoder_architecture": True, "num_kv_heads": HEADS},
    "MptForCausalLM": {"d_model": WIDTH, "n_layers": 1, "n_heads": HEADS},
    "LlamaForCausalLM": {**GATED, "num_attention_heads": 2 * HEADS},  # two queries a key
    "Qwen3ForCausalLM": {**GATED, "head_dim": 8},  # norms of heads
    "Phi3ForCausalLM": {**GATED, "pad_token_id": 0},  # gate and up in one matrix
    "MixtralForCausalLM": {**GATED, "num_local_experts": 8},  # a grouped product
    "BertForMaskedLM": {**SIZES, "intermediate_size": 256},
    "T5ForConditionalGeneration": {
        **{"d_model": WIDTH, "d_kv": 8, "num_layers": 1, "num_heads": HEADS, "d_ff": 256}
    },
    "ViTForImageClassification": {
        **{**SIZES, "intermediate_size": 256, "image_size": 32, "patch_size": 8, "num_labels": 16}
    },
}
OWN = ("gpt-s", "bert-s", "llama-s", "moe-s")
MODELS = (*CONFIGS, *OWN)
FUSED = ("GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM", "T5ForConditionalGeneration")
FUSED += OWN
KINDS = [
    (name, attn, amp)
    for name in MODELS
    for attn, amp in (("sdpa", False), ("eager", True))
    if attn == "eager" or name in FUSED
]
# Weights that every tensor-parallel rank multiplies with all of its tokens, as in Megatron-LM.
COPIED_PRODUCTS = {
    "BertForMaskedLM": r"predictions\.transform\.dense",  # between two norms of the whole width
    "MixtralForCausalLM": r"mlp\.gate\.weight",  # router: each rank chooses for all its tokens
    "moe-s": r"router",
}
# Parameters that every rank holds whole: norms, biases added to sums over ranks, positions.
NORMS_AND_SUMS = r"norm|ln_\w+\.|LayerNorm|bias$|position|wpe|positions|token_type|cls_token"
COPIED_PARAMETERS = {
    "T5ForConditionalGeneration": r"relative_attention_bias",  # a table of its heads on each
    "ViTForImageClassification": r"patch_embeddings",  # a convolution
}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where configurations are written."""
    Written.folder = tmp_path_factory.mktemp("configs")
    return Written.folder


class Written:
    """The folder of this module's configuration files."""

    folder: Path


@cache
def step(name: str, attn: str = "sdpa", amp: bool = False, **sizes: int) -> StepCapture:
    """A training step of a model; ``sizes`` are batch, seq, or settings of its configuration."""
    options: dict[str, Any] = {"attn": attn, "amp": amp, "dtype": "bf16" if amp else "fp32"}
    size = {"batch": sizes.pop("batch", BATCH), "seq": sizes.pop("seq", SEQ)}
    if name in OWN:
        return capture(name, **size, **options)
    values = {"vocab_size": VOCAB, **CONFIGS[name], **sizes, "architectures": [name]}
    path = Written.folder / f"{name}{len(list(Written.folder.iterdir()))}.json"
    path.write_text(json.dumps(values))
    return capture(path, whole=True, **size, **options)


def rank(found: StepCapture, text: str) -> StepCapture:
    """The step of one rank of a plan."""
    plan = ParallelPlan.parse(text)
    return tensor_parallel(context_parallel(expert_parallel(found, plan), plan), plan)


def work(found: StepCapture, phases: Sequence[str] = ()) -> Counter[str]:
    """FLOPs of matrix products and of attention."""
    total: Counter[str] = Counter()
    for call in found.calls:
        family, params = find_family(call)
        if family is not None and family.name in ("gemm", "attention"):
            total[family.name] += family.flops(params) * (not phases or call.phase in phases)
    return total


def degrees(name: str) -> list[int]:
    """Tensor-parallel degrees that divide the heads."""
    return {"bert-s": [2], "llama-s": [2], "gpt-s": [2, 4], "moe-s": [2, 4]}.get(name, [2, 4, 8])


def copied_flops(found: StepCapture, name: str) -> float:
    """FLOPs of the products that tensor parallelism copies: 3 * 2 * tokens * in * out each."""
    pattern = COPIED_PRODUCTS.get(name)
    shapes = [p.shape for p in found.parameters if pattern and re.search(pattern, p.name)]
    return sum(3 * 2 * found.tokens * s[0] * s[1] for s in shapes if len(s) == 2)


@pytest.mark.parametrize(("name", "attn", "amp"), KINDS)
def test_all_ranks_do_what_one_process_does(name: str, attn: str, amp: bool) -> None:
    """Products, attention and parameters, but for what ``COPIED_...`` and norms copy.

    With sp even the routers and heads without a pair are cut, by tokens, and all that is saved but
    masks, positions and what a convolution of patches reads. More ranks never raise the bytes and
    FLOPs of one. The loss is excepted: cut, it is several passes, not one.
    """
    found = step(name, attn, amp)
    whole, copied = work(found), copied_flops(found, name)
    stated = (NORMS_AND_SUMS, COPIED_PRODUCTS.get(name), COPIED_PARAMETERS.get(name))
    copies, made = "|".join(text for text in stated if text), [found]
    for tp in degrees(name):
        one, by_tokens = (rank(found, f"tp={tp}{sp}") for sp in ("", ",sp"))
        parts, tokens = work(one), work(by_tokens)
        assert parts["gemm"] * tp == pytest.approx(whole["gemm"] + (tp - 1) * copied)
        assert tokens["gemm"] * tp == pytest.approx(whole["gemm"])
        assert parts["attention"] * tp == tokens["attention"] * tp == whole["attention"]
        for p, part in zip(found.parameters, one.parameters, strict=True):
            copy = part.nbytes == p.nbytes and re.search(copies, p.name)
            assert copy or part.nbytes * tp == p.nbytes, p.name
        if tp == 2:
            saved = [saved_bytes(x) for x in (found, one, by_tokens)]
            assert saved[0] > saved[1] > saved[2] >= saved[0] / 2 and saved[2] < 0.62 * saved[0]
        made.append(one)
    flops, nbytes = [work(m)["gemm"] for m in made], [moved_bytes(m) for m in made]
    assert flops == sorted(flops, reverse=True) and nbytes == sorted(nbytes, reverse=True)


LOSS = ("softmax", "nll_loss", "amax", "exp", "log", "sub")


def moved_bytes(found: StepCapture) -> float:
    """Bytes that forward and backward move, but for the loss and messages."""
    passes = [c for c in found.calls if c.phase in ("forward", "backward") and c.op != COLLECTIVE]
    return sum(priceable(c).bytes_moved for c in passes if not any(x in c.op for x in LOSS))


def weights_read(found: StepCapture) -> Counter[tuple[str, str]]:
    """Elements of weights that products read, by phase and weight."""
    names = {p.storage: p.name for p in found.parameters}
    return Counter(
        {
            (c.phase, names[t.storage]): t.numel
            for c in found.calls
            if c.op in PRODUCTS
            for t in c.args[-2:]
            if t.storage in names
        }
    )


@pytest.mark.parametrize(("name", "attn", "amp"), KINDS)
def test_each_weight_is_read_once_by_all_ranks(name: str, attn: str, amp: bool) -> None:
    found = alias_weight_casts(step(name, attn, amp))
    whole = weights_read(found)
    made = weights_read(rank(found, "tp=2"))
    pattern = COPIED_PRODUCTS.get(name)
    for key, elements in whole.items():
        copied = pattern is not None and re.search(pattern, key[1])
        assert made[key] * (1 if copied else 2) == elements, key
    assert whole.keys() == made.keys()


def saved_bytes(found: StepCapture) -> int:
    return sum(x.saved_bytes * x.count for x in split_layers(found))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "moe-s"])
@pytest.mark.parametrize("text", ["tp=2", "tp=4,sp", ""])
def test_recomputation_is_one_more_forward(name: str, text: str) -> None:
    """Of each block, up to the last result that backward reads; under autocast and compiled too."""
    plan = ParallelPlan.parse(f"{text},amp,recompute=full".strip(","))
    found = with_engine(step(name, "sdpa", True), "compile")
    book = PriceBook(Flat(), HALVES, 0)
    made = price_model(found, plan, book, cluster_for(plan, HALVES))
    for block in made.layers[1:-1]:
        once, again = (
            sum(op.family == "gemm" for op in ops) for ops in (block.forward, block.backward)
        )
        assert once > 0 and 3 * once - 1 <= again <= 3 * once


@pytest.mark.parametrize("name", MODELS)
def test_autocast_and_compile_change_no_product(name: str, text: str = "tp=2,sp") -> None:
    """A compiled step is cut before its kernels are fused, which move no more bytes than apart."""
    plain, mixed = (rank(step(name, "eager", amp), text) for amp in (False, True))
    assert work(mixed) == work(plain)
    launched = as_launched(with_engine(mixed, "compile"))
    assert any(c.op == "itercast.fused" for c in launched.calls)
    assert work(launched) == work(mixed)
    moved = [
        sum(priceable(c).bytes_moved for c in m.calls if c.op != COLLECTIVE)
        for m in (mixed, launched)
    ]
    assert moved[1] < moved[0]
    found = rank_graph(
        with_engine(step(name, "eager", True), "compile"), ParallelPlan.parse(text), HALVES
    )
    assert work(found.capture) == work(mixed)


@pytest.mark.parametrize("causal", ["gpt-s", "bert-s"])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_rings_share_the_sequence(causal: str, cp: int, tp: int) -> None:
    """Each of cp ranks has its tokens and sees all keys: half of them where attention is causal."""
    whole = step(causal, seq=64)
    made = rank(step(causal, seq=64 // cp), f"cp={cp},tp={tp}")
    assert {k: v * cp * tp for k, v in work(made).items()} == work(whole)
    keys = [c.args[1].nbytes for c in whole.calls if c.op == "itercast.sdpa"]
    sent = [c for c in made.calls if c.op == COLLECTIVE and c.kwargs["axis"] == "cp"]
    total = sum(c.args[0].nbytes * c.kwargs["scale"] for c in sent if c.phase == "forward")
    assert total * cp * tp == (cp - 1) * sum(2 * n for n in keys)  # keys and values go around once


@pytest.mark.parametrize("name", MODELS)
def test_stages_share_the_calls_and_the_parameters(name: str) -> None:
    """Layers, which pipelines deal out, hold every call of forward and backward once."""
    found = step(name, "eager", True)
    layers = [x for x in split_layers(found) for _ in range(x.count)]
    assert sum(x.parameter_bytes for x in layers) == sum(p.nbytes for p in found.parameters)
    spans = [x.forward[1] - x.forward[0] + x.backward[1] - x.backward[0] for x in layers]
    assert sum(spans) == sum(c.phase in ("forward", "loss", "backward") for c in found.calls)


MESHES = ["dp=4,ep=4", "dp=8,ep=8", "dp=2,tp=2,sp,ep=2", "dp=4,tp=2,sp,ep=8", "tp=4,sp,ep=4"]


@pytest.mark.parametrize(
    "text", ["dp=2", "pp=2,micro=2", "pp=4,micro=4", "pp=2,micro=4,schedule=zb"]
)
def test_all_ranks_multiply_as_much_under_any_plan(text: str) -> None:
    """MFU is of all ranks: the last stage has the products over words, the others have not."""
    plan, step = ParallelPlan.parse(text), capture("gpt-s")
    alone, together = (outcome(step, t).matmul_s for t in ("", text))
    samples = plan.dp * plan.microbatches
    assert together * plan.world_size == pytest.approx(samples * alone)


@pytest.mark.parametrize("text", [*MESHES, "dp=4,tp=2,sp,ep=4,etp=1", "dp=2,tp=2,ep=2"])
def test_experts_are_spread_over_their_ranks(text: str) -> None:
    """Tokens of ep ranks meet at 1 / ep of the experts; without etp=1 tp cuts each expert too."""
    plan = ParallelPlan.parse(text)
    found = step("MixtralForCausalLM")
    made = rank(found, text)
    own = [p for p in found.parameters if len(p.shape) == 3]
    rest = [p for p in made.parameters if len(p.shape) == 3]
    ways = plan.ep * plan.expert_tp
    assert [p.nbytes * ways for p in rest] == [p.nbytes for p in own]
    copied = 0 if plan.sp else (plan.tp - 1) * copied_flops(found, "MixtralForCausalLM")
    assert work(made)["gemm"] * plan.tp == work(found)["gemm"] + copied
    tokens = next(c.args[0].shape for c in found.calls if c.op.startswith("aten._grouped"))
    sent = [c for c in made.calls if c.op == COLLECTIVE and c.kwargs["axis"] == "ep"]
    assert [c.phase for c in sent] == ["forward"] * 2 + ["backward"] * 2
    share = plan.tp if plan.sp else 1  # with sp each rank sends the tokens it holds
    assert all(c.args[0].numel * share == tokens[0] * tokens[1] for c in sent)
    assert plan.expert_replicas * ways == plan.tp * plan.dp


def test_replicas_of_experts_are_grouped_over_dp_or_over_all_ranks() -> None:
    """tp=2, dp=4: ep=2 leaves two replicas of halved experts; ep=8 of whole ones leaves one."""
    halved, whole = (ParallelPlan.parse(f"tp=2,sp,dp=4,ep={ep}") for ep in (2, 8))
    assert (halved.expert_tp, halved.expert_replicas) == (2, 2)
    assert (whole.expert_tp, whole.expert_replicas) == (1, 1)
    groups = cluster_for(ParallelPlan.parse("tp=2,sp,dp=8,ep=4,etp=1"), GPU).groups
    assert (groups["ep"].size, groups["ep"].per_node) == (4, 4)  # neighbours, tp among them
    assert (groups["expert"].size, groups["expert"].per_node) == (4, 2)


def test_heads_that_tp_does_not_divide_are_refused_in_eager_attention_too() -> None:
    with pytest.raises(ValueError, match="tp=8 does not divide 4 heads"):
        rank(step("gpt-s", "eager"), "tp=8")
    with pytest.raises(ValueError, match="tp=2 does not divide 1 heads"):
        rank(step("LlamaForCausalLM", "eager", num_key_value_heads=1), "tp=2")


def test_a_micro_batch_of_many_tokens_is_captured() -> None:
    """Transformers reads values of positions to tell packed sequences: 2^18 of them here."""
    found = step("LlamaForCausalLM", batch=16, seq=2**14)
    assert work(found)["gemm"] == work(step("LlamaForCausalLM", batch=1, seq=SEQ))["gemm"] * 2**14
    assert expert_weights(found) == {}
