"""Hugging Face configurations: what is built, what is fed, what a capture shows."""

import json
from pathlib import Path
from typing import Any

import pytest
from public_data import PUBLIC, needs_public

pytest.importorskip("transformers")

from itercast.api import capture as capture_any
from itercast.capture.base.remarks import remarks
from itercast.capture.cases.external.huggingface import hf_case
from itercast.capture.opcall import StepCapture
from itercast.capture.recorder.log import capture_step
from itercast.capture.step import StepSettings
from itercast.microbench.ops.matrix.gemm import GROUPED, from_grouped

FOLDER = "NeuSight/scripts/asplos/data/DLmodel_configs"
CONFIGS = sorted((PUBLIC / FOLDER).glob("*.json"))

TINY: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64},
    "BertForMaskedLM": {
        **{"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2},
        **{"intermediate_size": 64, "max_position_embeddings": 64},
    },
    "LlamaForCausalLM": {
        **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_hidden_layers": 2, "intermediate_size": 64, "rope_theta": 10000.0},
    },
    "T5ForConditionalGeneration": {
        **{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    },
    "BartForConditionalGeneration": {  # looks whether its mask is of ones, and draws layers
        **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "decoder_layerdrop": 1e-9},
        **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
    },
    "DebertaV2ForMaskedLM": {  # looks for padding among the tokens
        **{"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1},
        **{"intermediate_size": 64, "pad_token_id": 0},
    },
    "Llama4ForCausalLM": {  # positions as complex numbers
        **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"num_hidden_layers": 2, "intermediate_size": 64, "intermediate_size_mlp": 64},
        **{"num_local_experts": 2},
    },
    "ViTForImageClassification": {
        **{"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2},
        **{"intermediate_size": 64, "image_size": 32, "patch_size": 8},
    },
    "ConvNextForImageClassification": {  # reads rates of stochastic depth off a tensor
        **{"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": 32}
    },
}
SMALL_SIGHT = {
    **{"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2},
    **{"intermediate_size": 64, "image_size": 32, "patch_size": 8},
}
SENSES: dict[str, dict[str, Any]] = {
    "WhisperForConditionalGeneration": {
        **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 20},
        **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0},
        **{"decoder_start_token_id": 1, "max_target_positions": 2600},
    },
    "Wav2Vec2ForCTC": {
        **{"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "layerdrop": 0.0},
        **{"intermediate_size": 64, "conv_dim": [8, 8], "conv_kernel": [10, 3]},
        **{"conv_stride": [10, 8], "num_conv_pos_embeddings": 8, "vocab_size": 32},
        "apply_spec_augment": False,  # masks as many frames as chance has it
    },
    "CLIPModel": {"text_config": {**TINY["BertForMaskedLM"], "max_position_embeddings": 2560}}
    | {"vision_config": SMALL_SIGHT},
    "LlavaForConditionalGeneration": {
        "text_config": {"model_type": "llama", "vocab_size": 100, **TINY["LlamaForCausalLM"]},
        "vision_config": {"model_type": "clip_vision_model", **SMALL_SIGHT},
    },
    "VideoMAEForVideoClassification": {**SMALL_SIGHT, "num_frames": 4},
}
MOE: dict[str, dict[str, Any]] = {
    "SwitchTransformersForConditionalGeneration": {
        **{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_experts": 4},
        **{"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1},
        **{"num_sparse_decoder_layers": 1, "expert_capacity": 4},
    },
    "MixtralForCausalLM": {
        **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_hidden_layers": 1, "intermediate_size": 64, "num_local_experts": 4},
    },
}


def config(folder: Path, architecture: str, **values: Any) -> Path:
    path = folder / "tiny.json"
    sizes = {"vocab_size": 100, **({**TINY, **MOE, **SENSES}[architecture])}
    path.write_text(json.dumps({"architectures": [architecture], **sizes, **values}))
    return path


def capture(path: Path, batch: int = 2, seq: int = 16, **settings: str) -> StepCapture:
    return run(path, batch, seq, fake=True, **settings)


def run(path: Path, batch: int, seq: int, *, fake: bool, **settings: str) -> StepCapture:
    chosen = StepSettings(**settings)
    case = hf_case(path, mode=chosen.mode, loss=chosen.loss, attn=chosen.attn)
    inputs = case.inputs
    return capture_step(case.build, lambda: inputs(batch, seq), case.loss, chosen, fake=fake)


def sequence(found: StepCapture) -> list[Any]:
    return [
        (c.op, c.phase, [(t.shape, t.dtype) for t in (*c.tensors(), *c.outputs)])
        for c in found.calls
    ]


@pytest.mark.parametrize(
    ("architecture", "attn"),
    [
        *((name, "sdpa") for name in (*TINY, "MixtralForCausalLM")),
        *((name, "eager") for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM")),
    ],
)
def test_a_capture_equals_a_real_step(tmp_path: Path, architecture: str, attn: str) -> None:
    path = config(tmp_path, architecture)
    fake, real = (run(path, 2, 16, fake=f, attn=attn) for f in (True, False))
    assert sequence(fake) == sequence(real)


@pytest.mark.parametrize("architecture", [*SENSES])
def test_sound_and_pictures_too(tmp_path: Path, architecture: str) -> None:
    path = config(tmp_path, architecture)
    fake, real = (run(path, 2, 2560, fake=f, mode="train") for f in (True, False))
    assert sequence(fake) == sequence(real)


def test_a_picture_stands_beside_the_tokens_of_each_sample(tmp_path: Path) -> None:
    found = capture(config(tmp_path, "LlavaForConditionalGeneration"), seq=32, mode="infer")
    (patches,) = (c for c in found.calls if c.op == "aten.convolution.default")
    assert patches.outputs[0].shape == (2, 32, 4, 4)  # pictures of 32 x 32 in patches of 8
    (placed,) = (c for c in found.calls if c.op == "aten.masked_scatter.default")
    assert placed.args[2].shape == (2 * 16, 32)  # among the tokens


def test_labels_are_what_the_loss_is_of(tmp_path: Path) -> None:
    """Two letters each of 2,560 samples; which pairs belong; a class for each video."""
    losses = {
        "Wav2Vec2ForCTC": ("aten._ctc_loss.Tensor", [(4,)]),
        "CLIPModel": ("aten.nll_loss_forward.default", [(2,), (2,)]),
        "VideoMAEForVideoClassification": ("aten.nll_loss_forward.default", [(2,)]),
    }
    for architecture, (op, labels) in losses.items():
        found = capture(config(tmp_path, architecture), seq=2560, mode="train")
        assert [c.args[1].shape for c in found.calls if c.op == op] == labels


def test_attention_is_fused_or_written_out(tmp_path: Path) -> None:
    path = config(tmp_path, "GPT2LMHeadModel", attn_implementation="eager")  # asked, not read
    fused = [c.op for c in capture(path, mode="infer").calls]
    eager = [c.op for c in capture(path, mode="infer", attn="eager").calls]
    assert (fused.count("itercast.sdpa"), fused.count("aten.bmm.default")) == (2, 0)
    assert (eager.count("itercast.sdpa"), eager.count("aten.bmm.default")) == (0, 4)


def test_attention_that_cannot_be_fused_is_told_once(tmp_path: Path) -> None:
    """Transformers has no SDPA for DeBERTa v2; a ConvNeXt has no attention at all."""
    for architecture in ("DebertaV2ForMaskedLM", "ConvNextForImageClassification"):
        path = config(tmp_path, architecture)
        with remarks() as told:
            for _ in range(2):
                hf_case(path, mode="infer", loss="default", attn="sdpa").build()
        said = f"{architecture} has no sdpa attention in transformers: it is eager"
        assert told == [said] * (architecture == "DebertaV2ForMaskedLM")


def test_encoders_add_a_mask_to_every_score(tmp_path: Path) -> None:
    """Tokenizers make one of full sequences too; fused attention takes a full one for none.

    2 samples, 2 heads, 8 x 8 scores in each of two layers.
    """
    for attn, times in (("eager", 2), ("sdpa", 0)):
        step = capture(config(tmp_path, "BertForMaskedLM"), seq=8, attn=attn)
        added = [
            c
            for c in step.calls
            if c.op == "aten.add.Tensor" and c.outputs[0].shape == (2, 2, 8, 8)
        ]
        assert len(added) == times


def test_without_a_loss_there_is_no_cross_entropy(tmp_path: Path) -> None:
    path = config(tmp_path, "BertForMaskedLM")
    own = [c.op for c in capture(path).calls]
    none = [c.op for c in capture(path, loss="none", optimizer="none").calls]
    assert "aten.nll_loss_forward.default" in own
    assert "aten.nll_loss_forward.default" not in none
    assert not any("foreach" in op for op in none)


@pytest.mark.parametrize(
    ("dtype", "stored"), [("bf16", "bf16"), ("fp16", "fp16"), ("tf32", "fp32")]
)
def test_weights_and_products_have_the_dtype_asked_for(
    tmp_path: Path, dtype: str, stored: str
) -> None:
    """tf32 marks products only."""
    found = capture(config(tmp_path, "GPT2LMHeadModel", dtype="float32"), dtype=dtype)
    assert {p.dtype for p in found.parameters} == {stored}
    dtypes = {
        c.op.split(".")[1]: c.args[0].dtype
        for c in found.calls
        if c.phase == "forward" and c.op in ("aten.mm.default", "aten.native_layer_norm.default")
    }
    assert dtypes == {"mm": dtype, "native_layer_norm": stored}


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_tied_to_the_embeddings_as_the_file_says(tmp_path: Path, tied: bool) -> None:
    """transformers 5 ties T5's always; T5 1.1 has one more matrix of 128 words x 32."""
    sizes = TINY["T5ForConditionalGeneration"] | {"vocab_size": 128, "tie_word_embeddings": tied}
    found = capture(config(tmp_path, "T5ForConditionalGeneration", **sizes))
    matrices = [p.name for p in found.parameters if p.shape == (128, 32)]
    assert len(matrices) == (1 if tied else 2)


def test_switch_experts_take_an_even_share_up_to_their_capacity(tmp_path: Path) -> None:
    path = config(tmp_path, "SwitchTransformersForConditionalGeneration")
    found = capture(path, batch=2, seq=32, mode="infer")
    # 32 tokens a sequence over 4 experts are 8, of which the capacity lets 4 pass: 8 in two
    rows = [c.outputs[0].shape[0] for c in found.calls if c.op == "aten.nonzero.default"]
    assert sorted(set(rows)) == [4, 8]  # which experts are hit; rows of each
    wi = [c for c in found.calls if c.op == "aten.mm.default" and c.outputs[0].shape == (8, 64)]
    assert len(wi) == 2 * 4  # two sparse layers of four experts


def test_mixtral_experts_take_an_even_share_in_one_product(tmp_path: Path) -> None:
    """32 tokens, two experts each, over four experts: 16 rows of 32 or 64 columns each."""
    found = capture(config(tmp_path, "MixtralForCausalLM"), batch=2, seq=16)
    asked = [from_grouped(c) for c in found.calls if c.op == GROUPED]
    sizes = [(p.batch, p.m, p.n, p.k, p.layout) for p in asked if p]
    up, down = (4, 16, 128, 32, "nt"), (4, 16, 32, 64, "nt")
    assert sizes[:2] == [up, down]
    gradients = [(4, 32, 64, 16, "tn"), (4, 16, 64, 32, "nn")]  # of the weight, of the input
    gradients += [(4, 128, 32, 16, "tn"), (4, 16, 32, 128, "nn")]
    assert sorted(sizes[2:]) == sorted(gradients)


@needs_public(FOLDER)
@pytest.mark.parametrize("path", CONFIGS or [PUBLIC], ids=lambda p: p.stem)
def test_every_published_configuration_reads(path: Path) -> None:
    case = hf_case(path, mode="infer", loss="none", attn="eager")
    assert case.name == path.stem


@needs_public(FOLDER)
def test_a_published_configuration_has_its_published_size() -> None:
    path = next(p for p in CONFIGS if p.stem == "bert")
    found = capture(path, batch=1, seq=8, mode="infer")
    assert sum(p.nbytes for p in found.parameters) == 4 * 109_514_298  # one tied head


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["OwnModel"]}, "has no model OwnModel"),
        ({"architectures": []}, "no class name in 'architectures'"),
        ({"n_head": 5}, r"divisible.* \(modeling_gpt2\.py:\d+\)$"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_one_line(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    path = config(tmp_path, "GPT2LMHeadModel", **values)
    with pytest.raises(ValueError, match=message):
        capture_any(path, batch=2, seq=16)


def test_the_language_model_alone_of_one_that_sees(tmp_path: Path) -> None:
    path = config(tmp_path, "LlamaForCausalLM")
    text = {"vocab_size": 100, **TINY["LlamaForCausalLM"]}
    both = tmp_path / "both.json"
    both.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "text_config": text}))
    assert capture(both).parameters == capture(path).parameters


def test_no_code_of_the_folder_runs(tmp_path: Path) -> None:
    code = "raise SystemExit('ran')"
    (tmp_path / "modeling_own.py").write_text(code)
    own = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.Config"}
    assert capture(config(tmp_path, "GPT2LMHeadModel", auto_map=own)).calls


def test_too_long_a_sequence_is_named(tmp_path: Path) -> None:
    path = config(tmp_path, "GPT2LMHeadModel")
    with pytest.raises(ValueError, match="seq 65: this GPT2LMHeadModel has 64 positions"):
        capture(path, seq=65)
    with pytest.raises(ValueError, match="a sequence length is required"):
        capture(path, seq=0)
