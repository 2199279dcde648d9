"""What recomputation keeps is the policy's, whether kernels are fused or not."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from law_case import KIB, rank_for
from plan_case import GPU

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.graph.launch_modes import with_engine
from itercast.compose.graph.lifetimes import read_instead
from itercast.compose.graph.product_roles import weight_roles
from itercast.compose.parallel.tp import tensor_parallel
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.simulate.stages import stages_of

HALVES = replace(GPU, peak_flops_per_s={"fp32": 1e12, "bf16": 1e12, "fp8": 1e12}, l2_bytes=1e6)
TOKENS, WIDTH, HIDDEN, HEADS, KEYS = 32, 64, 128, 8, 2
LATENT: dict[str, Any] = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
LATENT |= {"vocab_size": 192, "hidden_size": WIDTH, "num_hidden_layers": 3}
LATENT |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "v_head_dim": 8}
LATENT |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
LATENT |= {"moe_intermediate_size": 20, "n_routed_experts": 8, "n_shared_experts": 2}
LATENT |= {"num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 192}
LLAMA |= {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": HEADS}
LLAMA |= {"num_key_value_heads": KEYS, "intermediate_size": HIDDEN}


@cache
def step(name: str, amp: bool, folder: Path, dtype: str = "bf16") -> StepCapture:
    """A step of a small Llama, of a mixture with latent attention, or of a case."""
    if name not in ("llama", "latent"):
        return capture(name, dtype=dtype, amp=amp)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(LLAMA if name == "llama" else LATENT))
    return capture(file, batch=2, seq=TOKENS // 2, dtype=dtype, amp=amp)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where configurations are written."""
    return tmp_path_factory.mktemp("configs")


def blocks(found: StepCapture, engine: str, text: str) -> list[PricedLayer]:
    """The numbered layers of a rank."""
    layers = rank_for(with_engine(found, engine), text.strip(","), HALVES).layers
    return [x for x in layers if x.numbered]


@cache
def launched(name: str, amp: bool, folder: Path, engine: str) -> StepCapture:
    """The step as an engine launches it."""
    return with_engine(step(name, amp, folder), engine)


@pytest.mark.parametrize("policy", ["full", "ops"])
@pytest.mark.parametrize("plan", ["", "tp=2", "tp=2,sp", "dp=8,zero=3"])
@pytest.mark.parametrize(("name", "amp"), [("llama", False), ("llama", True), ("gpt-s", True),
                                           ("llama-s", False), ("moe-s", False)])  # fmt: skip
def test_fused_kernels_save_what_the_policy_saves(
    name: str, amp: bool, plan: str, policy: str, folder: Path
) -> None:
    """Layer by layer as many bytes as eagerly, by each engine."""
    text = f"{plan}{',amp' * amp},recompute={policy}".strip(",")
    saved = {
        engine: [x.saved_bytes for x in rank_for(found, text, HALVES).layers if x.numbered]
        for engine in ("eager", "compile", "compile+graph", "fused")
        for found in [launched(name, amp and "zero" not in plan, folder, engine)]
    }
    assert saved == dict.fromkeys(saved, saved["eager"]) and saved["eager"]


@pytest.mark.parametrize("engine", ["eager", "compile"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_saved_bytes_of_a_llama_block_counted_by_hand(
    dtype: str, engine: str, folder: Path
) -> None:
    """32 tokens in bf16: a checkpoint saves a block's input, 32 * 64 * 2 = 4,096 bytes.

    So it does where products run in fp8.

    Selective recomputation of ops saves attention, 4,096, and every second product: queries and the
    output of the MLP, of 64 columns, values of 2 heads of 8, and the gate's 128.
    """
    found = step("llama", False, folder, dtype)
    (middle,) = {x.saved_bytes for x in blocks(found, engine, "recompute=full")[1:-1]}
    assert middle == TOKENS * WIDTH * 2 == 4_096
    (kept,) = {x.saved_bytes for x in blocks(found, engine, "recompute=ops")[1:-1]}
    sdpa, queries, values, gate, out = 4_096, 4_096, 32 * 16 * 2, 32 * HIDDEN * 2, 4_096
    assert kept == 4_096 + sdpa + queries + values + gate + out


def test_a_norm_keeps_its_input_where_weights_are_cast(folder: Path) -> None:
    """FSDP's mixed precision runs norms in bf16; kernels of a framework make the rest again.

    By token: input and result of two norms, q, k, v, attention, three of the MLP in 2 bytes each,
    and each norm's reciprocal in the 4 that transformers' norms compute in.
    """
    found = step("llama", False, folder)
    numbers = 2 * (WIDTH + WIDTH) + (WIDTH + 2 * KEYS * 8) + WIDTH + 3 * HIDDEN
    (saved,) = {x.saved_bytes for x in blocks(found, "fused", "dp=8,zero=1,amp")[1:-1]}
    assert saved == (2 * numbers + 2 * 4) * TOKENS


def test_a_softmax_in_fp32_is_kept_in_half_precision(folder: Path) -> None:
    """Unfused attention of 2 samples, 8 heads and 16 x 16 weights: 8 KiB in bf16, not 16."""
    step("llama", False, folder)  # writes the file
    found = capture(folder / "llama.json", batch=2, seq=TOKENS // 2, dtype="bf16", attn="eager")
    weights = next(c.outputs[0] for c in found.calls if c.op == "aten._softmax.default")
    assert weights.nbytes == 16 * KIB and read_instead(found)[weights.storage].nbytes == 8 * KIB


def test_a_view_is_no_kernel(folder: Path) -> None:
    """Forward's products give (tokens, columns), viewed as (batch, length, columns) for nothing."""
    found = rank_for(with_engine(step("llama", False, folder), "compile"), "", HALVES)
    calls = [c for c in found.model.graph.capture.calls if c.phase == "forward"]
    made = {t.storage for c in calls if c.op == "aten.mm.default" for t in c.outputs}
    fused = [c for c in calls if c.op == "itercast.fused"]
    assert not any(t.storage in made for c in fused for t in c.outputs)


def test_saved_bytes_of_latent_attention_and_experts_counted_by_hand(folder: Path) -> None:
    """bf16, 32 tokens of 64 numbers; 8 heads of 8 + 4 numbers and values of 8, 3 of 8 experts.

    By token. An eager loop keeps a norm's input in fp32 and what its weight multiplies; all that
    keys and values are projected to; copies in fp32 of the router's input and weight; the gates'
    activations; the experts' results. A framework's kernels keep a norm's input as it comes.
    """

    def norm(width: int, *, eager: bool, row: int) -> int:
        """What is kept of rows of ``row`` numbers, its input, and of the result."""
        return (4 * width + 4 + 2 * width if eager else 2 * row + 4) + 2 * width

    found = step("latent", False, folder)
    for engine, eager in (("eager", True), ("fused", False)):
        norms = 2 * norm(64, eager=eager, row=64) + norm(24, eager=eager, row=24)
        norms += norm(16, eager=eager, row=16 + 4)  # beside the rotary part of the keys
        attention = 2 * 8 * (12 + 12 + (8 + 8 if eager else 8) + 8)  # q, k, v, result
        router = 4 * 8 + (8 + 4) * 3 + 4 + (4 * 64 + 4 * 8 * 64 / TOKENS if eager else 0)
        order = 3 * (3 * 8 + 4) + 4 * 8 / TOKENS  # of tokens by expert, weights; rows of experts
        experts = 2 * 3 * (64 + 3 * 20 + (20 + 64 if eager else 0))
        shared = 2 * 40 * (4 if eager else 3)
        by_token = norms + attention + router + order + experts + shared
        assert blocks(found, engine, "")[1].saved_bytes == by_token * TOKENS


def test_dense_layers_before_mixtures_are_counted_as_layers(folder: Path) -> None:
    """Of four layers: kernels fused over their boundaries make no more kinds of them than two."""
    file = folder / "dense-first.json"
    file.write_text(json.dumps(LATENT | {"num_hidden_layers": 4, "first_k_dense_replace": 1}))
    found = with_engine(capture(file, batch=2, seq=TOKENS // 2, dtype="bf16"), "fused")
    stages = stages_of(rank_for(found, "pp=2,layers=1+3", HALVES))
    assert [sum(x.numbered for x in stage.layers) for stage in stages] == [1, 3]


def test_latent_attention_is_cut_by_heads_and_its_latents_are_not(folder: Path) -> None:
    """Queries 24 -> 8 x 12 and keys with values 16 -> 8 x 16 by columns, results 8 x 8 by rows."""
    found = step("latent", False, folder)
    roles = weight_roles(found)
    block = {p.name.split("self_attn.")[1]: roles.get(p.storage) for p in found.parameters
             if "layers.0.self_attn" in p.name and len(p.shape) == 2}  # fmt: skip
    whole = dict.fromkeys(("q_a_proj.weight", "kv_a_proj_with_mqa.weight"))
    cut = {"q_b_proj.weight": "column", "kv_b_proj.weight": "column", "o_proj.weight": "row"}
    assert block == whole | cut
    step_of_rank = tensor_parallel(found, ParallelPlan(tp=2))
    sizes = [c.args[1].shape for c in step_of_rank.calls if c.op == "aten.mm.default"][:5]
    assert sizes == [(64, 24), (24, 96 // 2), (64, 20), (16, 128 // 2), (64 // 2, 64)]
    (attention, *_) = (c for c in step_of_rank.calls if c.op == "itercast.sdpa")
    assert [t.shape for t in attention.tensors()] == [(2, 4, 16, n) for n in (12, 12, 8)]
