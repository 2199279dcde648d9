"""Published tables of iterations: models to build, plans in our grammar, reasons for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from itercast.eval.public.readers import read_source
from itercast.eval.public.sources.models import model_of
from itercast.eval.public.sources.plans import plan_of
from itercast.eval.public.sources.timm_models import timm_config
from itercast.microbench.importers.base import Hints
from itercast.microbench.plan import ParallelPlan

MPT = {
    **{"model": "125m", "model_note": "MPT (mpt_causal_lm)", "seq_len_tokens": "2048"},
    **{"layers": "12", "d_model": "768", "heads": "12", "ffn": "3072", "vocab": "50368"},
}
PLANS = yaml.safe_load(Path(__file__).with_name("stated_plans.yaml").read_text())


def parameters(hf_config: str | None) -> int:
    """Of the model that a configuration is of."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    facts = json.loads(hf_config or "{}")
    config = transformers.AutoConfig.for_model(**facts)
    with torch.device("meta"):
        model = getattr(transformers, facts["architectures"][0])(config)
    return sum(p.numel() for p in model.parameters())


def test_the_configuration_has_the_stated_parameters() -> None:
    """As many weights as MPT's own count; built for real, without memory."""
    assert parameters(model_of(MPT).hf_config) == 125_311_488


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3_30B_a3B", 30.5),
        ("Qwen3_235B_a22B", 235.1),
        ("GPT OSS 120B", 116.8),
        ("DeepSeekV3", 671.0),
    ],
)
def test_mixtures_of_experts_have_as_many_parameters_as_published(
    name: str, billions: float
) -> None:
    found = model_of({"model": name, "seq_len_tokens": "4096"})
    assert parameters(found.hf_config) / 1e9 == pytest.approx(billions, abs=0.1)
    assert ("without" in found.doubt) == (name not in ("Qwen3_30B_a3B", "Qwen3_235B_a22B"))


@pytest.mark.parametrize(
    ("given", "text"),
    PLANS,
)
def test_plans_are_texts_that_parse(given: dict[str, str], text: str) -> None:
    assert plan_of(given)[0] == text
    assert ParallelPlan.parse(text).world_size == int(given["n_gpus"])


def test_timm_states_its_conditions_in_the_file_name(tmp_path: Path) -> None:
    """fp16 autocast and SGD on one RTX 3090; 57.0 ms; a file with an unknown GPU is counted."""
    head = "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count"
    text = f"{head}\ntinynet_e,8879.06,57.0,512,106,2.04\n"
    (tmp_path / "benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv").write_text(text)
    (tmp_path / "benchmark-train-amp-nhwc-pt112-cu113-abacus.csv").write_text(text)
    found = read_source("iterations", tmp_path, Hints())
    (row,) = found.rows["iteration"].to_dict("records")
    expected: dict[str, Any] = {"case": "tinynet_e", "builder": "timm", "batch": 512}
    expected |= {"image_size": 106, "memory_format": "nhwc", "stack": "torch-1.12+cu113"}
    expected |= {"time_us": 57_000.0, "gpu": "rtx-3090", "dtype": "fp16", "amp": True}
    assert {name: row[name] for name in expected} == expected
    assert found.dropped == {"file of timm whose name states no layout, torch and known gpu": 1}


def test_a_fine_tuned_bert_has_the_sizes_of_its_name() -> None:
    sizes = {"layers": "24", "d_model": "1024", "heads": "16", "ffn": "4096"}
    tuned = {"model": "BERT", "section": "Fine-tuning", "seq_len_tokens": "384"}
    for row in (tuned, {"model": "bert_large_squad", "seq_len_tokens": "384"}):
        found = model_of(row | sizes)
        assert json.loads(found.hf_config)["num_hidden_layers"] == 24
        assert found.attn == "eager"
    assert model_of(tuned).doubt == "taken as BERT-large, the default of the recipe"


def test_transformer_xl_is_a_case_on_one_gpu() -> None:
    """Runs of more exchanged nothing: their steps are as long as those of one."""
    row = {"model": "transformerxlbase", "n_gpus": "1"}
    found = model_of(row)
    assert (found.case, found.builder) == ("transformer-xl-base", "case")
    assert (found.optimizer, "not blind" in found.doubt) == ("lamb", True)
    with pytest.raises(ValueError, match="gradients are not exchanged"):
        model_of(row | {"n_gpus": "8"})


def test_a_detector_is_a_case_unless_one_process_alone_was_counted() -> None:
    row = {"model": "SSD", "n_gpus": "8", "set": "v1"}
    assert model_of(row).case == "ssd300"
    assert model_of(row | {"n_gpus": "1", "set": "v0"}).optimizer == "sgd"
    with pytest.raises(ValueError, match="throughput is of one process"):
        model_of(row | {"set": "v0"})


def test_a_network_of_groups_is_left_to_timm() -> None:
    found = json.loads(model_of({"model": "se-resnext101-32x4d"}).hf_config)
    assert found["architecture"] == "seresnext101_32x4d"


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("resnet18", 11.69),
        ("tv_resnet50", 25.56),
        ("vit_base_patch16_224", 86.57),
        ("beit_base_patch16_224", 86.53),
        ("efficientnet_b0", 5.29),
        ("tf_efficientnet_b4_ns", 19.34),
        ("mobilenetv2_035", 1.68),
        ("mobilenetv2_140", 6.11),
        ("resnetv2_50x3_bitm", 217.32),
    ],
)
def test_a_timm_model_has_as_many_parameters_as_published(name: str, millions: float) -> None:
    assert parameters(timm_config(name, 224)) / 1e6 == pytest.approx(millions, abs=0.005)


@pytest.mark.parametrize(
    "name", ["resnet50d", "resnet77", "efficientnet_b0_gn", "beit_tall_patch16_224"]
)
def test_other_networks_are_named_as_on_the_hub(name: str) -> None:
    found = json.loads(timm_config(name, 176))
    assert found["architecture"] == name
    assert found["pretrained_cfg"] == {"input_size": [3, 176, 176]}
