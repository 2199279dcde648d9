"""LoRA: which parameters are trained, what the backward pass leaves out, what memory is saved."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from itercast.capture.opcall import StepCapture
from itercast.compose.capture_model import capture
from itercast.compose.target import find_target, forecast_step
from itercast.microbench.ops import find_family

LLAMA: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128},
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 4, "intermediate_size": 96, "max_position_embeddings": 64},
}
DEEP = LLAMA | {"num_hidden_layers": 8}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 128}
GPT2 |= {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}


def step(folder: Path, config: dict[str, Any] = LLAMA, **options: Any) -> StepCapture:
    """A step of two samples of 16 tokens in bf16, all layers captured."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    options = {"dtype": "bf16", "whole": True, **options}
    return capture(path, batch=2, seq=16, **options)


def trained(found: StepCapture) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in found.parameters if p.ready_after >= 0}


def product_flops(found: StepCapture, phase: str) -> int:
    """Of matrix products alone."""
    pairs = [find_family(c) for c in found.calls if c.phase == phase]
    return sum(int(f.flops(p)) for f, p in pairs if f is not None and f.name == "gemm")


@pytest.mark.parametrize("rank", [4, 8])
def test_rank_times_inputs_and_outputs_are_trained(tmp_path: Path, rank: int) -> None:
    """Queries 64 x 64 and values 64 x 32 of four layers: r * (128 + 96) each."""
    shapes = trained(step(tmp_path, lora=rank))
    assert sum(a * b for a, b in shapes.values()) == 4 * rank * (64 + 64 + 64 + 32)
    assert {name.split(".")[-3] for name in shapes} == {"q_proj", "v_proj"}


def test_default_layers_of_newer_models_are_known(tmp_path: Path) -> None:
    """Qwen3's queries (64 x 4 heads of 16) and values (64 x 2 of 16), as PEFT adapts them."""
    qwen = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
    shapes = trained(step(tmp_path, qwen, lora=4))
    assert sum(a * b for a, b in shapes.values()) == 4 * 4 * (64 + 64 + 64 + 32)


def test_layers_are_named_where_peft_has_no_default(tmp_path: Path) -> None:
    """Granite's queries and outputs (64 x 64), keys and values (64 x 32); a rank as tables say it.

    r * (128 + 128 + 96 + 96) in each of four layers; without names it is refused.
    """
    granite = LLAMA | {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    shapes = trained(step(tmp_path, granite, lora="rank=4.0,layers=q_proj+k_proj+v_proj+o_proj"))
    assert sum(a * b for a, b in shapes.values()) == 4 * 4 * (128 + 128 + 96 + 96)
    with pytest.raises(ValueError, match="lora: no default layers of model type 'granite'"):
        step(tmp_path, granite, lora=4)


def test_a_rank_above_a_layers_width_is_refused(tmp_path: Path) -> None:
    """Values have 64 inputs and 32 outputs."""
    assert trained(step(tmp_path, lora=32))
    with pytest.raises(ValueError, match=r"lora 33: .*v_proj has a width of 32"):
        step(tmp_path, lora=33)


def test_layers_of_gpt2_are_transposed(tmp_path: Path) -> None:
    """Queries, keys and values are one layer 64 x 192."""
    shapes = trained(step(tmp_path, GPT2, lora=4))
    assert sum(a * b for a, b in shapes.values()) == 2 * 4 * (64 + 192)


def test_frozen_weights_have_no_gradients(tmp_path: Path) -> None:
    """Two of three products of a layer go; the adapters have all three, of their own sizes.

    Nothing is below the first layer's queries and values that is trained.
    """
    whole, adapted = step(tmp_path), step(tmp_path, lora=4)
    adapters = 4 * 2 * 32 * 4 * (64 + 64 + 64 + 32)
    assert product_flops(adapted, "forward") - product_flops(whole, "forward") == adapters
    below = 2 * 32 * 64 * (64 + 32 + 32)  # into the first layer's norm: q, k, v
    into_adapters = 2 * 32 * 4 * (64 + 64)
    inputs = product_flops(whole, "backward") // 2
    backward = inputs - below + 2 * adapters - into_adapters
    assert product_flops(adapted, "backward") == backward


def test_states_and_gradients_are_those_of_the_adapters(tmp_path: Path) -> None:
    """fp32: two moments of four bytes for each trained number."""
    target = find_target("l40s", "", None, "", "")
    found = forecast_step(step(tmp_path, lora=4), target)
    numbers = 4 * 4 * (64 + 64 + 64 + 32)
    assert found.memory_by_bytes["optimizer"] == 2 * 4 * numbers
    assert found.memory_by_bytes["gradients"] <= 4 * numbers


def test_three_layers_stand_for_all(tmp_path: Path) -> None:
    """The first one's backward pass is shorter, so the middle one of three is repeated."""
    target = find_target("l40s", "", None, "", "")
    whole = forecast_step(step(tmp_path, DEEP, lora=4), target)
    short = forecast_step(step(tmp_path, DEEP, lora=4, whole=False), target)
    assert short.compute_us == pytest.approx(whole.compute_us, rel=1e-3)
    assert short.memory_by_bytes == whole.memory_by_bytes


def test_what_cannot_be_adapted_is_refused(tmp_path: Path) -> None:
    vit = {"architectures": ["ViTForImageClassification"], "model_type": "vit"}
    with pytest.raises(ValueError, match="lora: no default layers of model type 'vit'"):
        step(tmp_path, vit, lora=4)
    with pytest.raises(ValueError, match=r"lora 4 adapts .*, got gpt-s"):
        capture("gpt-s", lora=4)
